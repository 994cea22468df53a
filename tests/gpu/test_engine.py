"""Planned launches on a GPU: real streams, a real capture, compiled code, and the kernels that the profiler counts."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.device.backend import side_stream
from kitsune.device.cuda_graph import Recorder
from kitsune.launches.execution.kernel_trace import kernels_of
from kitsune.launches.pipeline import Planner
from kitsune.launches.recording.recorder import record
from kitsune.techniques import TECHNIQUES, Build
from kitsune.update.adamw import KernelUpdate
from tests.unit.kitsune.launches.steps import CASES, Step, equal, warmed

pytestmark = pytest.mark.usefixtures("more_streams_win")
triton = pytest.importorskip("triton")
tl = triton.language
STEPS = 20


@triton.jit
def doubled(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """The same bits from the same step, or nothing could be compared to the bit."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def deterministic(monkeypatch):
    """Without atomic additions in what Inductor generates. Filling all memory would launch kernels that nobody sees."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, capturable=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def adamw_by_our_kernel(parameters):
    optimizer = adamw(parameters)
    KernelUpdate(optimizer)
    return optimizer


def settle(*steps: Step, count: int = 3) -> None:
    for one in steps:
        torch.manual_seed(5)
        for _ in range(count):
            one()


def planned_and_plain(device, name, streams, make_optimizer=adamw, compiled=False):
    step, twin = warmed(name, make_optimizer, device=device)
    if compiled:
        for one in (step, twin):
            one.model.forward = torch.compile(one.model.forward)
    with side_stream(device):
        settle(step, twin)
        torch.manual_seed(1)
        planner = Planner(Recorder(device), streams)
        graph, result = planner.capture(step, step.inputs)
    assert graph is not None, planner.refusal
    return planner, graph, result, step, twin


def trained(device, graph, loss, twin):
    """(the losses of the planned steps, what the plain ones returned)."""
    losses = [loss.clone()]
    for _ in range(STEPS):
        graph.replay()
        losses.append(loss.clone())
    torch.manual_seed(1)
    with side_stream(device):
        return losses, [twin() for _ in range(STEPS + 1)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd, adamw_by_our_kernel])
def test_training_by_the_planned_step_is_training_to_the_bit(device, name, streams, make_optimizer):
    _, graph, (loss, gradients), step, twin = planned_and_plain(device, name, streams, make_optimizer)
    losses, expected = trained(device, graph, loss, twin)
    assert equal(losses, [each[0] for each in expected])
    assert equal(gradients, expected[-1][1])
    assert equal(step.state(), twin.state())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mlp", "branches", "tied"])
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.usefixtures("deterministic")
def test_compiled_steps_are_planned_too(device, name, streams):
    planner, graph, (loss, _), step, twin = planned_and_plain(device, name, streams, compiled=True)
    assert any("triton" in launch.name for launch in planner.plan.recording.graph.launches)
    losses, expected = trained(device, graph, loss, twin)
    assert equal(losses, [each[0] for each in expected])
    assert equal(step.state(), twin.state())


def test_several_streams_are_used(device):
    planner, *_ = planned_and_plain(device, "branches", 4)
    assert planner.plan.schedule.streams > 1
    assert any(placed.waits for placed in planner.plan.schedule.placed)


def test_the_update_by_our_kernel_is_cut_into_buckets_to_the_bit(device, monkeypatch):
    monkeypatch.setattr("kitsune.launches.transforms.splitting.FIRST_BYTES", 80)
    planner, graph, (loss, _), step, twin = planned_and_plain(device, "branches", 4, adamw_by_our_kernel)
    assert [launch.name for launch in planner.plan.recording.graph.launches].count("adamw") > 1
    losses, expected = trained(device, graph, loss, twin)
    assert equal(losses, [each[0] for each in expected])
    assert equal(step.state(), twin.state())


def test_replays_allocate_nothing(device):
    _, graph, *_ = planned_and_plain(device, "branches", 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


def test_planned_graphs_launch_what_the_step_launches(device):
    _, graph, _, _, twin = planned_and_plain(device, "branches", 1)
    launched = kernels_of(twin)
    assert launched
    assert kernels_of(graph.replay) == launched


def test_a_kernel_of_the_users_own_is_seen(device):
    x, weight = torch.randn(100, device=device), torch.ones(100, device=device)

    def step():
        y = torch.empty_like(x)
        doubled[(1,)](x, y, 100, BLOCK=128)
        weight.add_(y)
        return weight.sum()

    step()
    found = record(step, device)
    assert found.refusal == ""
    assert "doubled" in [launch.name for launch in found.recording.graph.launches]
    graph, total = Planner(Recorder(device), 2).capture(step, [x])
    expected = weight.clone()
    graph.replay()
    torch.testing.assert_close(weight, expected + 2 * x)
    torch.testing.assert_close(total, weight.sum())


def test_attention_with_dropout_draws_anew_at_every_replay(device):
    q = torch.randn(2, 2, 16, 64, device=device, dtype=torch.float16)

    def step():
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    with side_stream(device):
        step()
        graph, out = Planner(Recorder(device), 2).capture(step, [])
    assert graph is not None
    seen = set()
    for _ in range(5):
        graph.replay()
        seen.add(float(out.float().sum()))
    assert len(seen) == 5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("streams", [1, 4])
def test_compiled_for_several_streams_a_backward_writes_over_no_activation(device, streams):
    """What Inductor does for one stream: the gradient takes the place of what was saved for it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 10 * 10, 4)).to(device)
    optimizer = sgd(model.parameters())
    with contextlib.ExitStack() as undo:
        build = Build(model=model, optimizer=optimizer, device=device, forward=model, undo=undo)
        for knob, choice in {"compile": "default", "streams": streams}.items():
            TECHNIQUES[knob].apply(choice, build)
        x, y = torch.randn(4, 8, 16, 16, device=device), torch.randint(4, (4,), device=device)

        def step():
            optimizer.zero_grad()
            F.cross_entropy(build.forward(x), y).backward()
            optimizer.step()

        with side_stream(device):
            for _ in range(3):
                step()
            recorded = record(step, device)
    assert recorded.recording is not None, recorded.refusal
    graph = recorded.recording.graph
    written_over = [  # Inductor names its kernels after the operations in them
        launch.name
        for launch in graph.launches
        if "backward" in launch.name and any(graph.storages[span.storage].is_own for span in in_place(launch))
    ]
    assert bool(written_over) == (streams == 1)


def in_place(launch):
    written = {span.storage for span in launch.writes}
    return [span for span in launch.reads if span.storage in written]
