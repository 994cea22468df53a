"""FusionEngine: what it decides, what it tells of it, and that the model stays the user's own."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from kitsune.errors import SettingsError
from kitsune.fusion import FusionConfig, FusionEngine, FusionStats, Match, Pattern, operation_of
from kitsune.fusion.engine import GAVE_UP, NO_GPU
from kitsune.fusion.stats import Refused
from kitsune.kernels.layer_norm import layer_norm
from tests.unit.kitsune.fusion.fused import (
    CASES,
    ROWS,
    TARGETS,
    WIDTH,
    Activated,
    AddNorm,
    Dropped,
    Gated,
    Head,
    Norm,
    engine,
    normal,
    stats_of,
)


class Tower(nn.Module):
    """Two layers of the same kind, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([AddNorm(), AddNorm()])
        self.head = Head()

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x, x.sin())
        return self.head(x, target)


def train(model, call, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(ROWS.detach(), TARGETS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fused_layers_keep_their_own_weights_and_see_updates():
    torch.manual_seed(0)
    plain = Tower()
    model = copy.deepcopy(plain)
    fusing = engine()
    ours, wanted = train(model, fusing.fuse(model), 4), train(plain, plain, 4)
    assert fusing.get_fusion_stats().matches == {"linear_cross_entropy": 1, "add_layer_norm": 2}
    assert ours == pytest.approx(wanted, rel=1e-4)
    assert ours[-1] < ours[0]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert not torch.equal(model.layers[0].norm.weight, model.layers[1].norm.weight)


@pytest.mark.minutes  # test_technique.py has a smaller one
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_inductor_gets_the_rest():
    torch.manual_seed(0)
    plain = Tower()
    model = copy.deepcopy(plain)
    fusing = engine(compiler="inductor")
    assert train(model, fusing.fuse(model), 3) == pytest.approx(train(plain, plain, 3), rel=1e-4)
    assert fusing.get_fusion_stats().matches == {"linear_cross_entropy": 1, "add_layer_norm": 2}


def test_on_a_cpu_nothing_is_fused_and_the_stats_say_why():
    torch._dynamo.reset()
    fusing, model = FusionEngine(), Norm()
    assert torch.equal(fusing.fuse(model)(ROWS), model(ROWS))
    stats = fusing.get_fusion_stats()
    assert (stats.matches, stats.notes) == ({}, (NO_GPU,))


@pytest.mark.parametrize(("least", "is_kept"), [(1.0, True), (2.0, True), (2.1, False), (0.0, True)])
def test_the_threshold_is_of_the_measured_ratio(least, is_kept):
    stats = stats_of(Norm(), ROWS, min_fusion_benefit=least)
    assert bool(stats.matches) is is_kept
    if is_kept:
        assert stats.kept[0].benefit.ratio == 2.0
        assert stats.kept[0].benefit.original_ms == 2.0
    else:
        assert [one.reason for one in stats.refused] == ["2.00 times as fast, and min_fusion_benefit=2.1"]


def test_what_is_slower_stays_and_the_next_pattern_is_tried():
    def clock(original, fused):
        return (1.0, 2.0) if len(original()) == 3 + 1 else (3.0, 1.0)  # gradients of x, branch, weight and bias

    torch._dynamo.reset()
    fusing = engine(clock)
    fusing.fuse(AddNorm())(ROWS, normal(2, 3, WIDTH, seed=1))
    stats = fusing.get_fusion_stats()
    assert stats.matches == {"layer_norm": 1}
    assert [one.pattern for one in stats.refused] == ["add_layer_norm"]


def test_a_measurement_runs_both_forward_and_backward_and_draws_no_random_numbers():
    gradients = []

    def clock(original, fused):
        gradients.append([[tuple(one.shape) for one in run()] for run in (original, fused)])
        return 2.0, 1.0

    torch.manual_seed(5)
    wanted = torch.rand(3)
    fusing, model = engine(clock), Gated()
    torch.manual_seed(5)
    fusing.fuse(model)(ROWS)
    assert torch.equal(torch.rand(3), wanted)
    assert gradients == [[[(2, 3, 2 * WIDTH)] * 2] * 2]


def test_what_follows_a_kernel_is_measured_backward_too():
    found = []

    def clock(original, fused):
        found.append(len(original()))
        return 2.0, 1.0

    fusing = engine(clock)
    fusing.fuse(lambda x: F.silu(F.layer_norm(x, (WIDTH,))) * x.sin())(ROWS)
    assert fusing.get_fusion_stats().matches == {"layer_norm": 1, "swiglu": 1}
    assert found == [1, 2]  # gradients of x; of the norm, which is a kernel's by then, and of the sine


def test_shapes_are_measured_once_in_a_process():
    calls = []

    def clock(original, fused):
        calls.append(1)
        return 2.0, 1.0

    for rows in (2, 2, 3):
        fusing = engine(clock)
        fusing.fuse(Tower())(normal(rows, 3, WIDTH), torch.zeros(rows, 3, dtype=torch.int64))
        assert len(fusing.get_fusion_stats().kept) == 3
    assert len(calls) == 4


def layer_norm_twice(x, weight, bias, eps):
    layer_norm(x, weight, bias, eps)
    return layer_norm(x, weight, bias, eps)


def find_layer_norm(call, node: Node) -> Match | None:
    norm = operation_of(node)
    arguments = (norm.get("x"), None, None, 1e-5)
    return Match(call=call, arguments=arguments, results=(node,)) if norm.name == "layer_norm" else None


@pytest.mark.parametrize("calls", [(layer_norm, layer_norm), (layer_norm, layer_norm_twice)])
def test_another_call_is_measured_anew(calls):
    measured = []

    def clock(original, fused):
        measured.append(1)
        return 2.0, 1.0

    for call in calls:
        fusing = engine(clock)
        fusing.register_pattern(Pattern("layer_norm", "reduction", partial(find_layer_norm, call)))
        fusing.fuse(lambda x: F.layer_norm(x, (WIDTH,)))(ROWS)
        assert fusing.get_fusion_stats().matches == {"layer_norm": 1}
    assert len(measured) == len({*calls})


def test_the_same_operations_wired_otherwise_are_measured_anew():
    measured = []

    def clock(original, fused):
        measured.append(1)
        return 2.0, 1.0

    def find(node: Node) -> Match | None:
        outer = operation_of(node)
        if outer.name != "mul" or operation_of(outer.get("x")).name != "layer_norm":
            return None
        normed = outer.get("x")
        x = operation_of(normed).get("x")
        inner = (normed, *({outer.get("y")} - {x, normed}))
        return Match(call=torch.clone, arguments=(x,), results=(node,), inner=inner)

    for function in (lambda x: F.layer_norm(x, (WIDTH,)) * x, lambda x: (y := F.layer_norm(x, (WIDTH,))) * y):
        fusing = engine(clock)
        fusing.register_pattern(Pattern("wired", "reduction", find))
        fusing.fuse(function)(ROWS)
        assert fusing.get_fusion_stats().matches == {"wired": 1}
    assert len(measured) == 2


def test_what_cannot_be_measured_stays():
    def clock(original, fused):
        raise torch.OutOfMemoryError("out of memory\nand more")

    fusing = engine(clock)
    fusing.fuse(Norm())(ROWS)
    assert [one.reason for one in fusing.get_fusion_stats().refused] == ["it could not be measured: out of memory"]


def test_a_fused_kernel_stands_for_no_more_operations_than_asked():
    _, module, inputs = CASES["the RMSNorm of Llama"]
    stats = stats_of(module(), *inputs, max_fusion_size=5)
    assert stats.matches == {}
    assert stats.refused[0].reason == "6 operations are more than max_fusion_size=5"
    assert stats_of(module(), *inputs, max_fusion_size=6).kept[0].operations == 6


def test_the_stats_count_operations():
    stats = stats_of(Gated(), ROWS)
    assert (stats.operations_before, stats.operations_after) == (4, 3)
    assert str(stats) == "replaced swiglu 1 times; 4 operations became 3"


def rows_of_norm(x):
    return layer_norm(x, None, None, 1e-5) + 1


def find_norm(node: Node) -> Match | str | None:
    """A norm with 1 added to it, as some model may have it."""
    added = operation_of(node)
    norm = operation_of(added.get("x"))
    if added.name != "add" or added.get("y") != 1 or norm.name != "layer_norm":
        return None
    if norm.get("weight") is not None:
        return "it has a weight"
    return Match(call=rows_of_norm, arguments=(norm.get("x"),), results=(node,), inner=(added.get("x"),))


def test_a_registered_pattern_comes_before_those_of_ours():
    fusing = engine()
    fusing.register_pattern(Pattern("norm_and_one", "reduction", find_norm))

    def function(x):
        return F.layer_norm(x, (WIDTH,)) + 1

    torch.testing.assert_close(fusing.fuse(function)(ROWS), function(ROWS))
    assert fusing.get_fusion_stats().matches == {"norm_and_one": 1}


def test_a_registered_pattern_takes_the_place_of_one_of_the_same_name():
    fusing = engine()
    fusing.register_pattern(Pattern("layer_norm", "reduction", lambda node: None))
    fusing.fuse(Norm())(ROWS)
    assert fusing.get_fusion_stats().matches == {}


def test_a_call_that_gives_something_else_is_refused():
    fusing = engine()

    def find(node: Node) -> Match | None:
        is_norm = operation_of(node).name == "layer_norm"
        return Match(call=torch.sum, arguments=(operation_of(node).get("x"),), results=(node,)) if is_norm else None

    fusing.register_pattern(Pattern("layer_norm", "reduction", find))
    fusing.fuse(Norm())(ROWS)
    assert [one.reason for one in fusing.get_fusion_stats().refused] == [
        "the kernel gives float32[] for float32[2, 3, 8]"
    ]


def test_a_compiler_that_there_is_not_is_refused():
    with pytest.raises(SettingsError, match="compiler"):
        FusionEngine(FusionConfig(), compiler="nvfuser")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"enable_matmul": False}, True, "fast"])
def test_what_is_no_configuration_is_refused(given):
    with pytest.raises(SettingsError, match="FusionConfig"):
        FusionEngine(given)


@pytest.mark.parametrize("given", ["leaky", find_norm, None])
def test_what_is_no_pattern_is_refused(given):
    with pytest.raises(SettingsError, match="Pattern"):
        FusionEngine().register_pattern(given)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(SettingsError, match="model or a function"):
        FusionEngine().fuse(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("engines", [1, 10])
def test_more_models_are_fused_than_torch_keeps_variants_of_one_function(engines):
    fusing = [engine() for _ in range(engines)]
    models = [Activated() for _ in range(10)]
    for number, model in enumerate(models):
        torch.testing.assert_close(fusing[number % engines].fuse(model)(ROWS), model(ROWS))
    stats = [one.get_fusion_stats() for one in fusing]
    assert sum(one.matches["linear_activation"] for one in stats) == 10
    assert not any(GAVE_UP in one.notes for one in stats)


@torch._dynamo.config.patch(recompile_limit=2)
def test_calls_that_torch_no_longer_compiles_run_as_given_and_leave_a_note():
    fusing, model = engine(), Norm()
    fused = fusing.fuse(model)
    for rows in (1, 2, 1):
        fused(normal(rows, 3, WIDTH))
        assert GAVE_UP not in fusing.get_fusion_stats().notes
    x = normal(3, 3, WIDTH)
    assert torch.equal(fused(x), model(x))
    stats = fusing.get_fusion_stats()
    assert (stats.matches, stats.notes.count(GAVE_UP)) == ({"layer_norm": 2}, 1)


def test_a_fused_model_is_a_module_that_runs_its_hooks():
    model = nn.Sequential(Norm(), nn.Dropout(0.5))
    fused, seen = engine().fuse(model), []
    model.register_forward_hook(lambda *_: seen.append(1))
    fused.eval()
    fused(ROWS)
    assert isinstance(fused, nn.Module) and not model.training
    assert [*fused.parameters()] == [*model.parameters()]
    assert seen == [1]


def test_dropout_is_drawn_anew_at_every_step():
    fused = engine().fuse(Dropped())
    x, residual = torch.ones(8, 8), torch.zeros(8, 8)
    assert not torch.equal(fused(x, residual), fused(x, residual))


def test_what_is_refused_is_told_with_a_reason_for_each_pattern():
    slow, plain = "0.90 times as fast, and min_fusion_benefit=1", "it has a mask"
    refused = (Refused("mlp", slow), Refused("attention", plain), Refused("attention", plain))
    told = str(FusionStats(refused=refused))
    assert told.endswith(f"; refused mlp 1 times ({slow}), attention 2 times ({plain})")
