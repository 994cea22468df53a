"""What was measured of a kernel of ours once holds for every process on such a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kitsune.base.file_cache import KeyedFiles
from kitsune.fusion import benefit, benefits
from kitsune.fusion.benefits import FOLDER, Benefits
from kitsune.fusion.stats import Benefit
from tests.unit.kitsune.fusion.fused import ROWS, AddNorm, Norm, stats_of


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A machine of its own, which has a GPU."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "H1")
    return tmp_path / FOLDER


def fused(monkeypatch, *times_ms, model=None, **config):
    """What is kept in another process, where the clock of the GPU tells these times, and how often it was asked."""
    asked = []

    def clock(original, fused):
        asked.append(times_ms)
        return times_ms

    monkeypatch.setattr(benefit, "side_by_side_ms", clock)
    monkeypatch.setattr(benefit, "_measured", {})
    found = stats_of(model or Norm(), *(ROWS,) * (2 if isinstance(model, AddNorm) else 1), clock=clock, **config)
    return found.matches, len(asked)


def test_what_is_worth_about_as_much_as_is_asked_for_is_decided_once(monkeypatch):
    assert fused(monkeypatch, 1.11, 1.0, min_fusion_benefit=1.1) == ({"layer_norm": 1}, 1)
    assert fused(monkeypatch, 1.09, 1.0, min_fusion_benefit=1.1) == ({"layer_norm": 1}, 0)
    assert fused(monkeypatch, 1.09, 1.0, min_fusion_benefit=1.2) == ({}, 0), "what is asked for is the user's"


def test_another_gpu_other_code_and_another_match_are_measured(monkeypatch):
    assert fused(monkeypatch, 2.0, 1.0)[1] == 1
    assert fused(monkeypatch, 2.0, 1.0, model=AddNorm())[1] > 0
    for name, value in (("torch.cuda.get_device_name", lambda *_: "H2"), ("kitsune.fusion.benefits.CODE_KEY", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert fused(monkeypatch, 2.0, 1.0)[1] == 1
    assert fused(monkeypatch, 2.0, 1.0)[1] == 0


def test_a_clock_of_somebody_elses_is_asked_in_every_process(monkeypatch, folder):
    for _ in range(2):
        monkeypatch.setattr(benefit, "_measured", {})
        assert stats_of(Norm(), ROWS).matches == {"layer_norm": 1}
    assert not folder.exists()


def test_a_call_that_is_not_ours_is_measured_in_every_process():
    def theirs():
        raise AssertionError("it is only named")

    said = ("layer_norm", "eager")
    assert benefits.key_of(theirs, said, torch.device("cuda")) is None
    assert benefits.key_of(Norm.forward, said, torch.device("cuda")) is None
    assert benefits.key_of(torch.Tensor.add, said, torch.device("cuda")) is None
    ours = benefit.fused_of
    assert benefits.key_of(ours, said, torch.device("cuda")) != benefits.key_of(
        benefit.original_of, said, torch.device("cuda")
    )
    assert benefits.key_of(ours, said, torch.device("cuda")) != benefits.key_of(ours, (), torch.device("cuda"))
    assert benefits.key_of(ours, (repr(object()),), torch.device("cuda")) is None, "an address"


def test_of_two_that_measured_at_the_same_time_the_first_holds(tmp_path):
    one, other = Benefit(1.11, 1.0), Benefit(1.09, 1.0)
    kept = Benefits(KeyedFiles(tmp_path))
    assert kept.find("key") is None
    assert kept.keep("key", one) == kept.keep("key", other) == kept.find("key") == one
    assert [each.name for each in tmp_path.iterdir()] == ["key"], "and no draft"


def test_so_it_is_for_threads_that_do_it_at_once(tmp_path):
    kept = Benefits(KeyedFiles(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        for number in range(50):
            found = set(pool.map(lambda ms, key=f"{number}": kept.keep(key, Benefit(ms, 1.0)), range(1, 9)))
            assert len(found) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"1", b"1 2 3", b"x 1", b"1 0", b"nan 1", b"-1 1", b"9" * 400 + b" 1"]
)
def test_a_broken_file_costs_a_measurement(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    kept, measured = Benefits(KeyedFiles(tmp_path)), Benefit(2.0, 1.5)
    assert kept.find("key") is None
    assert kept.keep("key", measured) == kept.find("key") == measured
