"""What torch compiles of a graph with kernels of ours in it is found by the next process, until their code changes."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.amp.autocast_mode import _enter_autocast
from torch.fx import Graph, GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from kitsune.device.backend import first_line
from kitsune.device.tf32 import full_precision
from kitsune.fusion import Match, Pattern, cache_key, norms
from kitsune.fusion.calls import added_dropout, layer_norm
from kitsune.kernels.swiglu import swiglu
from tests.unit.kitsune.fusion.fused import ROWS, Norm, engine, step

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


@pytest.mark.minutes
def test_what_one_process_has_compiled_the_next_one_finds():
    (first, at_first), (second, then) = fused(), fused()
    assert (at_first, then) == (0, 1)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_other_code_of_ours_is_compiled_anew(monkeypatch):
    fused()
    monkeypatch.setattr(cache_key, "CODE_KEY", "of another day")
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
    states = [cache_key.state()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            states.append(cache_key.state())
    with torch._functorch.config.patch(donated_buffer=False):
        states.append(cache_key.state())
    with full_precision():
        states.append(cache_key.state())
    assert len({repr(state) for state in states}) == len(states)


def calling(*functions):
    """A graph that calls each, and torch's own addition."""
    graph = Graph()
    x = graph.placeholder("x")
    for function in (*functions, torch.add):
        x = graph.call_function(function, (x, x))
    graph.output(x)
    return GraphModule(nn.Module(), graph)


def marks(graph, **settings):
    return cache_key.cache_options(graph, **settings)[OPTION]


def test_every_call_of_ours_is_known_in_whatever_order_they_come():
    calls = (layer_norm, swiglu, theirs, added_dropout, _enter_autocast)
    keys = {
        "kitsune.fusion.calls.added_dropout": cache_key.CODE_KEY,
        "kitsune.fusion.calls.layer_norm": cache_key.CODE_KEY,
        "kitsune.kernels.swiglu.swiglu": cache_key.CODE_KEY,
        "torch.amp.autocast_mode._enter_autocast": torch.__version__,
    }
    found = [marks(calling(*order)) for order in (calls, calls[::-1])]
    assert [list(each) for each in found] == [sorted([*keys, cache_key.MARK])] * 2
    assert [{**each, cache_key.MARK: ""} for each in found] == [{**keys, cache_key.MARK: ""}] * 2
    assert found[0][cache_key.MARK] != found[1][cache_key.MARK], "other graphs"
    assert list(marks(calling(theirs))) == [cache_key.MARK]


def test_the_mark_tells_graphs_apart_and_no_names():
    def graph(name="x", scale=2.0, outputs=1):
        found = Graph()
        x = found.placeholder(name)
        y = found.call_function(torch.mul, (x, scale))
        found.output((y, x)[:outputs])
        return GraphModule(nn.Module(), found)

    given = marks(graph())
    assert marks(graph("another")) == given
    others = [marks(graph(scale=3.0)), marks(graph(outputs=2)), marks(graph(), may_run_twice=True)]
    assert len({str(each) for each in (given, *others)}) == 4


def test_what_a_user_has_marked_stays_so():
    with torch._inductor.config.patch({OPTION: {"z": "1", "a": "2"}}):
        found = marks(calling(torch.sub))
    assert list(found) == ["a", cache_key.MARK, "z"]
    assert (found["a"], found["z"]) == ("2", "1")


def test_ours_are_those_of_hashed_sources(monkeypatch):
    assert cache_key.is_ours(layer_norm)
    assert cache_key.is_ours(swiglu)
    assert not cache_key.is_ours(first_line), "of kitsune.device.backend"
    assert not cache_key.is_ours(theirs)
    monkeypatch.setattr(cache_key, "CODE_KEY", "")
    assert not cache_key.is_ours(layer_norm), "without a source its code may be any"


def test_the_hash_is_that_of_every_source_and_its_name(monkeypatch, tmp_path):
    package, given = tmp_path / "kitsune", cache_key.PACKAGE
    assert cache_key.hash_of(package) == ""
    for pattern in cache_key.SOURCES:
        for path in given.glob(pattern):
            copied = package / path.relative_to(given)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    keys = [cache_key.hash_of(package)]
    assert keys == [cache_key.CODE_KEY], "wherever they lie"
    for changed in (
        package / "kernels/layer_norm.py",
        package / "fusion/calls.py",
        package / "launches/execution/graph_benchmark.py",
    ):
        changed.write_text(changed.read_text() + "\n")
        keys.append(cache_key.hash_of(package))
    (package / "kernels/layer_norm.py").rename(package / "kernels/layer_norn.py")  # at the same place in their order
    keys.append(cache_key.hash_of(package))
    monkeypatch.setenv("TRITON_INTERPRET", "another")
    keys.append(cache_key.hash_of(package))
    assert len(set(keys)) == len(keys)
