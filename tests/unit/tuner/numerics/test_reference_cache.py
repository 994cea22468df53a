from types import SimpleNamespace

import torch

from tuner.numerics.reference_cache import ReferenceCache, cache_for, digest_of
from tuner.numerics.trace_errors import Errors, Trace, TraceStep, TrainingStart

ERRORS = Errors(
    loss={0: 0.1, 9: 0.25}, gradient={0: 1e-7}, singles=[0.5], size=1.0, sizes=[1.5], parameter=0.1, buffer=0
)


def a_start(value: float = 1.0) -> TrainingStart:
    return TrainingStart(
        [torch.full((3, 2), value), torch.ones(2, dtype=torch.bfloat16)], [torch.tensor(3)], ["w", "n"]
    )


def a_trace() -> Trace:
    gradients = [torch.tensor([1 / 3], dtype=torch.float64), None]
    parameters = [torch.tensor([1 / 3], dtype=torch.float64)]
    return Trace({0: TraceStep(0.5, gradients)}, steps=10, parameters=parameters, buffers=[torch.tensor(3)])


def never() -> tuple[Trace, str]:
    raise AssertionError("computed twice")


def test_the_first_computes_and_the_next_ones_read(tmp_path):
    cache = cache_for(str(tmp_path), a_start(), torch.ones(2))
    made, _ = cache.trace("reference", lambda: (a_trace(), "a note"))
    assert made.parameters[0].dtype is torch.float64
    found, note = cache.trace("reference", never)
    assert (note, found.steps, found.snapshots[0].loss) == ("a note", 10, 0.5)
    gradient, nothing = found.snapshots[0].gradients
    assert nothing is None
    assert gradient.dtype is torch.float32
    assert torch.equal(found.parameters[0], made.parameters[0]), "an update is small beside its parameter"
    assert cache.errors("yardstick-bf16", lambda: ERRORS) == ERRORS
    assert cache.errors("yardstick-bf16", never) == ERRORS


def test_another_start_or_batch_shares_nothing(tmp_path):
    digests = {
        digest_of(a_start(), torch.ones(2)),
        digest_of(a_start(2.0), torch.ones(2)),
        digest_of(a_start(), (torch.ones(2), {"mask": torch.zeros(1)})),
    }
    assert len(digests) == 3
    assert digest_of(a_start(), torch.ones(2)) in digests


def test_without_a_folder_each_computes(tmp_path):
    cache = cache_for(None, a_start(), torch.ones(2))
    assert [cache.errors("y", lambda: ERRORS), cache.errors("y", lambda: ERRORS)] == [ERRORS, ERRORS]
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_room_nothing_is_kept(tmp_path, monkeypatch):
    asked = []

    def almost_full(path):
        asked.append(path)
        return SimpleNamespace(free=10)

    monkeypatch.setattr("tuner.numerics.reference_cache.shutil.disk_usage", almost_full)
    cache = ReferenceCache(tmp_path, "d")
    for _ in range(2):
        assert cache.trace("reference", lambda: (a_trace(), ""))[0].steps == 10
    assert len(asked) == 2, "the second computed too"
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
