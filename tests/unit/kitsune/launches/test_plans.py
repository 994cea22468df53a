"""The whole way on the CPU twin: record, split, schedule, plan memory, issue on threads, prove. To the bit."""

from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

from kitsune.device.cuda_graph import Recorder
from kitsune.launches.execution.issue import HostLane, HostLanes, issue
from kitsune.launches.execution.launch_costs import measured_us
from kitsune.launches.pipeline import Planner
from kitsune.launches.planning.memory_plan import plan_memory
from kitsune.launches.planning.schedule import in_order, on_streams
from kitsune.launches.plans import budget_of, plans
from kitsune.launches.transforms.splitting import split
from kitsune.workload import batch_tensors, call_model, loss_of
from tests.unit.kitsune.launches.steps import CASES, CPU, adam, adamw, equal, recorded, rmsprop, sgd, warmed
from tuner.workloads.loader import load_workload

pytestmark = pytest.mark.usefixtures("even")

STEPS = 20


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_training_by_the_planned_step_is_training_to_the_bit(name, streams, make_optimizer):
    step, twin = warmed(name, make_optimizer)
    torch.manual_seed(1)
    planner = Planner(Recorder(CPU), streams)
    graph, (loss, gradients) = planner.capture(step, step.inputs)
    assert planner.refusal == ""
    assert 1 < planner.plan.schedule.streams <= streams or streams == 1
    losses = [loss.clone()]
    for _ in range(STEPS):
        graph.replay()
        losses.append(loss.clone())
    torch.manual_seed(1)
    expected = [twin() for _ in range(STEPS + 1)]
    assert equal(losses, [each[0] for each in expected])
    assert equal(gradients, expected[-1][1])
    assert equal(step.state(), twin.state())


@pytest.mark.parametrize("make_optimizer", [adam, rmsprop])
def test_other_optimizers_and_clipping(make_optimizer):
    step, twin = warmed("branches", make_optimizer, clip=0.1)
    planner = Planner(Recorder(CPU), 3)
    graph, _ = planner.capture(step, step.inputs)
    assert graph is not None, planner.refusal
    assert planner.plan.schedule.streams > 1
    twin()
    for _ in range(STEPS):
        graph.replay()
        twin()
    assert equal(step.state(), twin.state())


def test_another_batch_goes_through_the_static_one():
    step, twin = warmed("branches")
    planner = Planner(Recorder(CPU), 3)
    graph, (loss, _) = planner.capture(step, step.inputs)
    assert planner.plan.schedule.streams > 1
    twin()
    for number in range(4):
        for one in (step, twin):
            one.inputs[0].copy_(torch.randn(one.inputs[0].shape, generator=torch.Generator().manual_seed(number)))
        graph.replay()
        assert torch.equal(loss, twin()[0])


@pytest.mark.parametrize("name", ["lenet5", "resnet50", "googlenet", "bert_base", "vit_b16", "gpt2_small", "dlrm"])
def test_models_of_the_zoo_are_planned_in_half_precision(name, monkeypatch):
    workload = load_workload(f"zoo:{name}?size=tiny", "cpu", 0)
    model, (x, y) = workload.model, workload.batch
    optimizer = adamw(model.parameters())

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(call_model(model, x), workload.loss_fn, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    planner = Planner(Recorder(CPU), 4)
    graph, _ = planner.capture(step, batch_tensors((x, y)))
    assert graph is not None, planner.refusal
    plan = planner.plan
    assert plan.schedule.streams > 1
    assert plan.memory.peak_bytes < plan.memory.naive_bytes


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_forward_alone_is_planned_as_well(without):
    step, _ = warmed("branches")
    model, (x, _) = step.model.eval(), step.inputs

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16):  # its casts are aten::to in inference_mode
            return model(x)

    with without():
        planner = Planner(Recorder(CPU), 3)
        graph, out = planner.capture(forward, [x])
        assert planner.plan.schedule.streams > 1
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
        graph.replay()
        assert torch.equal(out, forward())


def test_gradients_of_two_batches_are_accumulated_in_one_step():
    step, twin = warmed("frozen")

    def twice(one):
        for parameter in one.model.parameters():
            parameter.grad = None
        x, y = one.inputs
        for rows in (slice(0, 3), slice(3, 6)):
            torch.nn.functional.cross_entropy(one.model(x[rows]), y[rows]).backward()
        one.optimizer.step()

    planner = Planner(Recorder(CPU), 4)
    graph, _ = planner.capture(lambda: twice(step), step.inputs)
    assert planner.plan.schedule.streams > 1
    twice(twin)
    for _ in range(4):
        graph.replay()
        twice(twin)
    assert equal(step.state(), twin.state())


def random_costs(count, seed):
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 100).tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["branches", "frozen", "recurrent"])
def test_any_schedule_on_threads_gives_the_same_bits(name, seed):
    step, twin = warmed(name)
    recording = split(recorded(step), bucket_bytes=64)
    expected = twin()
    costs_us = random_costs(len(recording.calls), seed)
    schedule = on_streams(recording.graph, costs_us, 4, 1.0)
    assert schedule.streams > 1
    for _ in range(3):
        result = issue(recording, schedule, plan_memory(recording.graph, schedule), HostLanes(4))
        expected = twin()
        assert equal(result[1], expected[1])
        assert equal(step.state(), twin.state())


def test_a_storage_that_is_let_go_too_early_is_noticed():
    step, _ = warmed("branches")
    recording = recorded(step)
    schedule = in_order(recording.graph, [1.0] * len(recording.calls))
    plan = plan_memory(recording.graph, schedule)
    first = next(at for at, storages in enumerate(plan.releases) if storages)
    releases = list(plan.releases)
    releases[first - 1], releases[first] = releases[first], ()
    with pytest.raises(KeyError):
        issue(recording, schedule, type(plan)(tuple(releases), 0, 0), HostLane())


def test_an_error_on_a_lane_comes_out_and_nothing_hangs():
    ran = []

    def fail_on_the_first() -> None:
        with HostLanes(2) as lanes:
            lanes.submit(0, 0, (), lambda: 1 / 0)
            lanes.submit(1, 1, (0,), lambda: ran.append(1))

    with pytest.raises(ZeroDivisionError):
        fail_on_the_first()
    assert ran == []


def test_the_gradients_of_a_convolution_and_the_update_are_split():
    step, _ = warmed("branches")
    recording = recorded(step)
    smaller = split(recording, bucket_bytes=512)
    count = [launch.name for launch in recording.graph.launches].count("convolution_backward")
    names = [launch.name for launch in smaller.graph.launches]
    both = [name for name in names if name.startswith("convolution_backward of")]
    # The gradient of the images is asked of neither of the first two convolutions.
    assert count == 3
    assert both == ["convolution_backward of input", "convolution_backward of weight"]
    assert names.count("_fused_adamw_") > 2
    updated = [span for launch in smaller.graph.launches if launch.name == "_fused_adamw_" for span in launch.writes]
    whole = next(launch for launch in recording.graph.launches if launch.name == "_fused_adamw_")
    assert bytes_in(updated) == bytes_in(whole.writes)
    assert all(span.end - span.begin <= 512 for span in updated)


def bytes_in(spans):
    """storage -> its bytes in the spans, each as often as it is there"""
    found = defaultdict(Counter)
    for span in spans:
        found[span.storage].update(range(span.begin, span.end))
    return found


def test_planning_leaves_state_and_generators_alone():
    step, _ = warmed("mlp")
    recording = recorded(step)
    before, drawn = [tensor.clone() for tensor in step.state()], torch.get_rng_state()
    plans(recording, 4, None)
    assert equal(step.state(), before)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_pool_is_not_exceeded_and_the_smallest_plan_is_better_than_none(monkeypatch):
    x = torch.rand(100)

    def side_by_side():
        """Two streams need two pools for what is done with at once."""
        for operation in (torch.cos, torch.sin, torch.tan, torch.exp):
            operation(x)

    recording = recorded(side_by_side)
    alone, *others = plans(recording, 4, 2**40)
    peaks = sorted({plan.memory.peak_bytes for plan in others})
    assert alone.schedule.streams == 1
    assert alone.memory.peak_bytes == 512
    assert peaks == [1024, 1536, 2048]
    for pool_bytes in (512, *peaks):
        found = plans(recording, 4, pool_bytes)
        assert max(plan.memory.peak_bytes for plan in found) <= pool_bytes
        assert len(found) == sum(plan.memory.peak_bytes <= pool_bytes for plan in (alone, *others))
    (least,) = plans(recording, 4, 511)
    assert least.memory.peak_bytes == 512
    assert least.name == "as recorded, which takes 0.0 MiB: no plan fits into a pool of 0.0 MiB"


def test_where_nobody_says_how_much_several_streams_take_a_fifth_more_of_all(monkeypatch):
    step, _ = warmed("branches")
    (alone,) = plans(recorded(step), 1, None)
    held_bytes = sum(storage.nbytes() for storage in alone.recording.held.values())
    assert budget_of(alone, 5) == 5
    assert budget_of(alone, None) == alone.memory.peak_bytes + 2**25
    monkeypatch.setattr("kitsune.launches.plans.MIN_EXTRA_BYTES", 1)
    assert budget_of(alone, None) == alone.memory.peak_bytes + (alone.memory.peak_bytes + held_bytes) // 5


def test_every_launch_has_a_cost():
    step, _ = warmed("mlp")
    recording = recorded(step)
    costs_us = measured_us(recording)
    assert len(costs_us) == len(recording.graph.launches)
    assert min(costs_us) > 0


class ZeroWidth(nn.Module):
    """Joins a tensor of no columns, as models with optional inputs do."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.first(x)
        joined = torch.cat([hidden.new_zeros(len(x), 0), hidden], 1)
        return self.last(joined.tanh() + self.second(x)) + hidden[:0].sum()


@pytest.mark.parametrize("streams", [1, 3])
def test_tensors_without_elements_are_there_when_they_are_named(streams):
    step, twin = warmed("mlp", sgd)
    for one in (step, twin):
        torch.manual_seed(3)
        one.model = ZeroWidth()
        one.optimizer = sgd(one.model.parameters())
    step(), twin()
    planner = Planner(Recorder(CPU), streams)
    graph, _ = planner.capture(step, step.inputs)
    assert planner.refusal == ""
    assert planner.plan.schedule.streams > 1 or streams == 1
    twin()
    for _ in range(3):
        graph.replay()
        twin()
    assert equal(step.state(), twin.state())


def test_a_result_that_repeats_itself_is_filled():
    step, _ = warmed("branches", sgd)
    planner = Planner(Recorder(CPU), 3)
    graph, static = planner.capture(lambda: (step(), torch.ones(1).expand(3)), step.inputs)
    assert planner.refusal == ""
    graph.replay()
    assert torch.equal(static[1], torch.ones(3))
