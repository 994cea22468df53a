"""Launches as given and fused: runs that are counted, on copies, so that a model is none the wiser."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.errors import CaptureError
from kitsune.fusion import FusionEngine
from kitsune.fusion.launches import copy_of, counter_of, launches_of, on_gpu
from tests.unit.kitsune.fusion.fused import ROWS, Activated, BatchNormed, Dropped, Norm, always_faster, normal

#: Where a norm, a GELU and their backward are seen from below autograd, as a GPU sees launches.
NORM = ("aten::native_layer_norm", "aten::native_layer_norm_backward")
OUR_NORM = ("kitsune::layer_norm", "kitsune::layer_norm_backward")


class Seen(TorchDispatchMode):
    """The operators that run in the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


class OperatorCounter:
    """Runs once to warm up and once to count, as a GPU's counter does; what computes something counts."""

    def __init__(self):
        self.runs = []

    def __call__(self, run):
        run()
        with Seen() as seen:
            run()
        self.runs.append([name for name in seen.names if name.startswith("kitsune::") or "layer_norm" in name])
        return len(self.runs[-1])


def counting(counter, **options):
    torch._dynamo.reset()
    return FusionEngine(clock=always_faster, counter=counter, **options)


def test_both_are_run_forward_and_backward_and_counted():
    counter = OperatorCounter()
    engine = counting(counter)
    engine.fuse(nn.Sequential(Norm(), Norm()))(ROWS)
    before, after = counter.runs
    assert sorted(before) == sorted(NORM * 2)
    assert {*OUR_NORM} <= {*after} and not {*NORM} & {*after}
    stats = engine.get_fusion_stats()
    assert (stats.launches_before, stats.launches_after) == (len(before), len(after))
    assert f"{len(before)} launches became {len(after)}" in str(stats)
    assert stats.notes == ()


def test_without_gradients_only_the_forward_counts():
    counter = OperatorCounter()
    with torch.no_grad():
        counting(counter).fuse(Norm())(ROWS)
    assert counter.runs[0] == [NORM[0]]
    assert {*OUR_NORM} & {*counter.runs[1]} == {OUR_NORM[0]}


def test_graphs_add_up_and_one_that_nothing_was_replaced_in_is_not_run():
    def function(x, y):
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
        torch._dynamo.graph_break()
        y = (x + y).sin()
        torch._dynamo.graph_break()
        return torch.nn.functional.layer_norm(y * 2, y.shape[-1:])

    counter = OperatorCounter()
    engine = counting(counter)
    engine.fuse(function)(ROWS.detach(), ROWS.detach())
    assert counter.runs == [[NORM[0]], [OUR_NORM[0]]] * 2
    assert engine.get_fusion_stats().launches_before == engine.get_fusion_stats().launches_after == 2


def test_nothing_replaced_is_nothing_run():
    def never(run):
        raise AssertionError("it was run")

    engine = counting(never)
    engine.fuse(torch.sin)(ROWS)
    stats = engine.get_fusion_stats()
    assert (stats.launches_before, stats.launches_after, stats.notes) == (None, None, ())


def test_weights_statistics_gradients_and_random_numbers_are_as_they_were():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(BatchNormed(), nn.Flatten())
            self.dropped = Dropped()

        def forward(self, x, scale):
            scale.mul_(2)
            y = self.layers(x) * scale
            return self.dropped(y, y.sin())

    torch.manual_seed(0)
    plain = Model()
    models = [plain, copy.deepcopy(plain)]
    x = normal(2, 6, 5, 5)
    drawn, scales = [], []
    for model, counter in zip(models, (lambda run: 1, OperatorCounter()), strict=True):
        engine, scale = counting(counter), torch.ones(1)
        torch.manual_seed(7)
        engine.fuse(model)(x, scale)
        drawn.append(torch.rand(3))
        scales.append(scale)
        assert set(engine.get_fusion_stats().matches) == {"batch_norm_relu", "dropout_add"}
        assert engine.get_fusion_stats().launches_after is not None
    assert torch.equal(*drawn) and torch.equal(*scales) and scales[0] == 2
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(one, other)
    assert all(parameter.grad is None for parameter in models[1].parameters()) and x.grad is None


def test_what_a_graph_holds_itself_and_the_generator_are_as_they_were():
    root, nodes = nn.Module(), Graph()
    root.register_buffer("calls", torch.zeros(1))
    x = nodes.placeholder("x")
    called = nodes.call_method("add_", (nodes.get_attr("calls"), 1))
    drawn = nodes.call_function(torch.rand_like, (x,))
    nodes.output((nodes.call_function(torch.add, (drawn, called)),))
    graph, state = GraphModule(root, nodes), torch.get_rng_state()
    runs = []
    launches_of(graph, graph.forward, [torch.ones(3)], lambda run: runs.append(run()) or 1, torch.device("cpu"))
    assert len(runs) == 2 and runs[1][0].min() >= 2
    assert graph.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.minutes
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_beside_inductor_what_is_counted_is_what_inductor_made():
    gradients = []

    def counter(run):
        run()
        with Seen() as seen:
            gradients.append([one.shape for one in run()])
        return len(seen.names)

    engine, model = counting(counter, compiler="inductor"), nn.Sequential(Norm(), Activated())
    engine.fuse(model)(ROWS).sum().backward()
    stats = engine.get_fusion_stats()
    assert set(stats.matches) == {"layer_norm", "linear_activation"}
    assert gradients[0] == gradients[1]
    assert len(gradients[0]) == 1 + len(list(model.parameters()))
    assert 0 < stats.launches_after < stats.launches_before
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CaptureError("torch.profiler is running"), "launches were not counted: torch.profiler is running"),
        (torch.OutOfMemoryError("out of memory\nand more"), "launches were not counted: out of memory"),
    ],
)
def test_what_cannot_be_counted_is_told_and_the_model_runs(error, told):
    def counter(run):
        raise error

    engine, model = counting(counter), Norm()
    torch.testing.assert_close(engine.fuse(model)(ROWS), model(ROWS))
    stats = engine.get_fusion_stats()
    assert (stats.launches_before, stats.launches_after, stats.notes) == (None, None, (told,))
    assert "launches" not in str(stats)


def test_a_cpu_launches_none_and_the_stats_say_so():
    engine = counting(None)
    engine.fuse(Norm())(ROWS)
    stats = engine.get_fusion_stats()
    assert (stats.launches_before, stats.notes) == (None, ("launches were not counted: a CPU launches none",))


def test_a_process_of_a_group_makes_no_runs_of_its_own(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert counter_of(gpu) is on_gpu
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(CaptureError, match="processes of a group"):
        counter_of(gpu)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(4.0).expand(3, 4),
        torch.arange(24.0)[3::2].requires_grad_(),
        torch.empty(0, 3),
        torch.tensor(3),
    ],
)
def test_a_copy_lies_as_its_tensor_does_on_memory_of_its_own(value):
    copied = copy_of(value)
    assert torch.equal(copied, value) and copied.is_leaf
    assert (copied.stride(), copied.dtype, copied.requires_grad) == (value.stride(), value.dtype, value.requires_grad)
    assert not value.numel() or copied.data_ptr() != value.data_ptr()


def test_what_is_no_tensor_is_its_own_copy():
    assert copy_of(3) == 3
