"""What torch compiles of a graph with kernels of ours in it is found by the next process, until their code changes."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from kitsune.device import first_line
from kitsune.fusion import Match, Pattern, norms, own_calls
from kitsune.fusion.calls import added_dropout, layer_norm
from kitsune.kernels.swiglu import swiglu
from tests.unit.kitsune.fusion.fused import ROWS, Activated, Norm, engine, step

OPTION = "unsafe_marked_cacheable_functions"

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
    monkeypatch.setattr(own_calls, "CODE_KEY", "of another day")
    assert fused()[1] == 0
    assert fused()[1] == 1


def test_a_call_of_somebody_elses_is_compiled_in_every_process():
    pattern = Pattern("layer_norm", "reduction", find_theirs)
    assert [fused(pattern)[1] for _ in range(2)] == [0, 0]


def test_flags_that_torchs_key_does_not_hold_are_in_ours():
    with sdpa_kernel(SDPBackend.MATH):
        fused()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert fused()[1] == 0
    with sdpa_kernel(SDPBackend.MATH):
        assert fused()[1] == 1
    states = [own_calls.state_mark()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            states.append(own_calls.state_mark())
    assert len({str(state) for state in states}) == 3


def calling(*functions):
    """A graph that calls each, and torch's own addition."""
    graph = Graph()
    x = graph.placeholder("x")
    for function in (*functions, torch.add):
        x = graph.call_function(function, (x, x))
    graph.output(x)
    return GraphModule(nn.Module(), graph)


def test_every_call_of_ours_is_marked_in_whatever_order_they_come():
    calls = (layer_norm, swiglu, theirs, added_dropout)
    names = ["kitsune.fusion.calls.added_dropout", "kitsune.fusion.calls.layer_norm", "kitsune.kernels.swiglu.swiglu"]
    found = [own_calls.cache_options(own_calls.marks_of(calling(*order))) for order in (calls, calls[::-1])]
    assert [list(options.items()) for options in found] == [[(OPTION, dict.fromkeys(names, own_calls.CODE_KEY))]] * 2
    assert [list(options[OPTION]) for options in found] == [names, names]
    assert own_calls.cache_options(own_calls.marks_of(calling(theirs))) == {}


def test_what_a_user_has_marked_stays_so():
    with torch._inductor.config.patch({OPTION: {"their.function": "1"}}):
        assert own_calls.cache_options({"b": "2", "a": "3"}) == {OPTION: {"a": "3", "b": "2", "their.function": "1"}}


def test_ours_are_those_of_hashed_sources(monkeypatch):
    assert own_calls.is_ours(layer_norm)
    assert own_calls.is_ours(swiglu)
    assert not own_calls.is_ours(first_line), "of kitsune.device"
    assert not own_calls.is_ours(theirs)
    monkeypatch.setattr(own_calls, "CODE_KEY", "")
    assert not own_calls.is_ours(layer_norm), "without a source its code may be any"


def test_the_hash_is_that_of_every_source_and_its_name(monkeypatch, tmp_path):
    package, given = tmp_path / "kitsune", own_calls.PACKAGE
    assert own_calls.hash_of(package) == ""
    for pattern in own_calls.SOURCES:
        for path in given.glob(pattern):
            copied = package / path.relative_to(given)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    keys = [own_calls.hash_of(package)]
    assert keys == [own_calls.CODE_KEY], "wherever they lie"
    for changed in (package / "kernels/layer_norm.py", package / "fusion/calls.py", package / "engine/contest.py"):
        changed.write_text(changed.read_text() + "\n")
        keys.append(own_calls.hash_of(package))
    (package / "kernels/layer_norm.py").rename(package / "kernels/layer_norn.py")  # at the same place in their order
    keys.append(own_calls.hash_of(package))
    monkeypatch.setenv("TRITON_INTERPRET", "another")
    keys.append(own_calls.hash_of(package))
    assert len(set(keys)) == len(keys)


def hits_of_a_process():
    """How often AOTAutograd's cache was hit by a model with several calls of ours."""
    fusing, model = engine(compiler="inductor"), nn.Sequential(Norm(), Activated())
    counters.clear()
    step(fusing.fuse(model), list(model.parameters()), ROWS)
    assert len(fusing.get_fusion_stats().matches) == 2
    return counters["aot_autograd"]["autograd_cache_hit"]


def test_processes_come_to_the_same_keys():
    found = []
    for seed in ("1", "2"):
        program = "from tests.unit.kitsune.fusion.test_own_calls import hits_of_a_process; print(hits_of_a_process())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[4],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    assert found == [0, 1]
