"""What torch compiles of a graph with kernels of ours in it is found by the next process, until their code changes."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from kitsune.fusion import Match, Pattern, norms, own_calls
from kitsune.fusion.calls import layer_norm
from tests.unit.kitsune.fusion.fused import ROWS, Norm, engine, step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch's compiler


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def theirs(*given):
    return layer_norm(*given) * 2


def find_theirs(node):
    match = norms.layer_norm(node)
    return replace(match, call=theirs) if isinstance(match, Match) else match


def fused(*patterns):
    """A step of a fused LayerNorm as another process would make it, and how often AOTAutograd's cache was hit."""
    fusing, model = engine(compiler="inductor"), Norm()
    for pattern in patterns:
        fusing.register_pattern(pattern)
    torch.compiler.reset()
    counters.clear()
    found = step(fusing.fuse(model), list(model.parameters()), ROWS)
    assert fusing.get_fusion_stats().matches == {"layer_norm": 1}
    return found, counters["aot_autograd"]["autograd_cache_hit"]


def test_what_one_process_has_compiled_the_next_one_finds():
    (first, at_first), (second, then) = fused(), fused()
    assert (at_first, then) == (0, 1)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_other_code_of_ours_is_compiled_anew(monkeypatch):
    fused()
    monkeypatch.setattr(own_calls, "code_key", lambda: "of another day")
    assert fused()[1] == 0
    assert fused()[1] == 1


def test_a_call_of_somebody_elses_is_compiled_in_every_process():
    pattern = Pattern("layer_norm", "reduction", find_theirs)
    assert [fused(pattern)[1] for _ in range(2)] == [0, 0]


def test_the_key_is_that_of_every_source(monkeypatch, tmp_path):
    package, key = tmp_path / "kitsune", own_calls.code_key.__wrapped__
    for folder in own_calls.FOLDERS:
        shutil.copytree(own_calls.PACKAGE / folder, package / folder)
    given = key()
    monkeypatch.setattr(own_calls, "PACKAGE", package)
    assert key() == given, "wherever they lie"
    keys = {given}
    for changed in (package / "kernels/layer_norm.py", package / "fusion/calls.py"):
        changed.write_text(changed.read_text() + "\n")
        keys.add(key())
    (package / "kernels/layer_norm.py").rename(package / "kernels/another_norm.py")
    assert len({*keys, key()}) == 4


def test_without_sources_nothing_is_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(own_calls, "PACKAGE", tmp_path)
    assert own_calls.is_ours(layer_norm)
    monkeypatch.setattr(own_calls, "code_key", own_calls.code_key.__wrapped__)
    assert not own_calls.is_ours(layer_norm)
