"""The whole way on the CPU twin: record, split, schedule, plan memory, issue on threads, prove. To the bit."""

import itertools
import random
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

from kitsune.device.cuda_graph import Recorder
from kitsune.errors import ErraticError
from kitsune.launches.execution.equivalence import reorder
from kitsune.launches.execution.issue import HostLane, HostLanes, in_recorded_order, issue
from kitsune.launches.execution.launch_costs import measured_us
from kitsune.launches.pipeline import PROOFS, Planner
from kitsune.launches.planning.memory_plan import plan_memory
from kitsune.launches.planning.schedule import in_order, on_streams
from kitsune.launches.plans import budget_of, plans
from kitsune.launches.recording.recorder import record
from kitsune.launches.transforms.splitting import split
from kitsune.workload import batch_tensors, call_model, loss_of
from tests.unit.kitsune.launches.steps import (
    CASES,
    CPU,
    adam,
    adamw,
    equal,
    even_us,
    recorded,
    rmsprop,
    sgd,
    warmed,
    why_refuted,
)
from tuner.workloads.loader import load_workload

STEPS = 20


class OfTheirOwn(Exception):
    """Of the user's code: derives from nothing that anybody else raises."""


@pytest.fixture(autouse=True)
def even(monkeypatch):
    """Several streams are the quickest by prediction, whatever else this CPU does."""
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)


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


# What the proof must find ---------------------------------------------------------------------------------------------


def proven(step, tamper=lambda: None):
    recording = recorded(step)
    schedule = in_order(recording.graph, [1.0] * len(recording.calls))
    plan = plan_memory(recording.graph, schedule)

    def replay():
        result = issue(recording, schedule, plan, HostLane())
        tamper()
        return result

    return why_refuted(recording, step, replay)


def test_the_proof_accepts_the_step_and_leaves_everything_as_it_was():
    step, _ = warmed("branches")
    recording = recorded(step)
    before = [tensor.clone() for tensor in (*step.state(), *step.inputs)]
    assert why_refuted(recording, step, in_recorded_order(recording)) is None
    assert equal([*step.state(), *step.inputs], before)


@pytest.mark.parametrize("where", ["weight", "statistics", "optimizer"])
def test_the_proof_finds_a_single_bit(where):
    step, _ = warmed("branches")
    tensor = {
        "weight": step.model.head.weight.data,
        "statistics": step.model.norm.running_var,
        "optimizer": step.optimizer.state[step.model.head.weight]["exp_avg"],
    }[where]
    assert proven(step, lambda: tensor.view(torch.int32).view(-1)[:1].bitwise_xor_(1)) is not None


def test_a_batch_of_one_row_changes_from_step_to_step_too():
    """A step that bakes in what was in its batch when it was recorded is found out."""
    step, _ = warmed("mlp", sgd)
    step.inputs[:] = [tensor[:1].clone() for tensor in step.inputs]
    plain = step.model.forward
    step.model.forward = lambda x: plain(x) * float(x.numpy()[0, 0])
    assert proven(step) == "its numbers differ from those of the step, first in what it returns"


def test_the_proof_names_the_launch_that_writes_what_differs():
    step, _ = warmed("branches")
    variance = step.model.norm.running_var
    assert proven(step, lambda: variance.mul_(2)).endswith("first in what native_batch_norm writes")


def test_the_proof_finds_what_changes_with_the_data_only():
    """A branch on the host, by a value: the launches of the recorded step are right for the recorded batch alone."""
    step, _ = warmed("mlp")
    plain = step.model.forward

    def by_first_label(x):
        return plain(x) * (2.0 if step.inputs[1].numpy()[0] == 0 else 1.0)

    step.model.forward = by_first_label
    assert proven(step) == "its numbers differ from those of the step, first in what it returns"


@torch.library.custom_op("kitsune_test::honest", mutates_args=("total",))
def honest(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(x.sum())
    return x * 2


@torch.library.custom_op("kitsune_test::liar", mutates_args=())
def liar(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(x.sum())
    return x * 2


class Counting(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            return x + self.operation(x.detach(), self.total)


def counting(operation):
    step, twin = warmed("mlp")
    for one in (step, twin):
        one.model.insert(0, Counting(operation))
    return step, twin


def test_a_custom_operation_that_declares_what_it_writes_is_planned():
    step, twin = counting(honest)
    graph, _ = Planner(Recorder(CPU), 2).capture(step, step.inputs)
    twin()
    for _ in range(3):
        graph.replay()
        twin()
    assert torch.equal(step.model[0].total, twin.model[0].total)


def test_a_custom_operation_that_lies_about_what_it_writes_is_refused():
    step, _ = counting(liar)
    planner = Planner(Recorder(CPU), 2)
    graph, result = planner.capture(step, step.inputs)
    assert graph is None
    assert "kitsune_test::liar writes total, which its schema says it only reads" in planner.refusal
    assert isinstance(result[0], torch.Tensor)


@torch.library.custom_op("kitsune_test::beyond", mutates_args=())
def beyond(x: torch.Tensor) -> torch.Tensor:
    """It counts in memory that it was not given."""
    torch.as_strided(x, (1,), (1,), 0).add_(1)
    return x * 1


class Beyond(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            return x + 0 * beyond(self.table[4:]).sum()


def test_what_an_operation_does_in_secret_while_it_is_proven_is_put_back():
    step, twin = warmed("mlp")
    for one in (step, twin):
        one.model.insert(0, Beyond())
    planner = Planner(Recorder(CPU), 2)
    graph, _ = planner.capture(step, step.inputs)
    twin()
    assert graph is None
    assert planner.refusal.endswith("an operation writes memory that its schema says it only reads")
    assert torch.equal(step.model[0].table, twin.model[0].table)
    assert step.model[0].table[0] == 1


def test_the_proof_finds_what_changes_though_nobody_writes_it():
    step, _ = warmed("frozen")
    assert "writes memory that its schema says" in proven(step, lambda: step.model.first.weight.data.add_(1.0))


class Island(nn.Module):
    """A product in fp32, whatever autocast the caller is in."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.first(x).float()
        with torch.autocast("cpu", enabled=False):
            return self.second(hidden)


def test_autocast_of_the_caller_casts_nothing_that_is_issued_again():
    model, x = Island(), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        recording = recorded(lambda: model(x).detach())
        found, expected = in_recorded_order(recording)(), model(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@torch.library.custom_op("kitsune_test::shaky", mutates_args=())
def shaky(x: torch.Tensor) -> torch.Tensor:
    """Like atomic additions on a GPU: every time other last bits."""
    return x * (1 + 1e-6 * random.uniform(-1, 1))


class Shaky(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            return shaky(x.detach())


def test_a_step_that_differs_from_itself_may_differ_as_much():
    step, _ = warmed("mlp", sgd)
    step.model.insert(0, Shaky())
    assert proven(step) is None


class Leaping(nn.Module):
    """Noise, and in one call a leap, as Adam makes with a gradient that is nothing but noise."""

    def __init__(self, leap_at):
        super().__init__()
        self.calls = itertools.count()
        self.leap_at = leap_at

    def forward(self, x):
        with torch.no_grad():
            return shaky(x.detach()) * (1.01 if next(self.calls) == self.leap_at else 1.0)


@pytest.mark.parametrize("leap_at", [0, 3, 5, 7])  # in a run of the step, of the graph, of the step again
def test_a_rare_leap_of_either_is_no_difference(leap_at):
    step, _ = warmed("mlp", sgd)
    step.model.insert(0, Leaping(None))
    recording = recorded(step)
    step.model[0] = Leaping(leap_at)
    assert why_refuted(recording, step, step) is None
    assert next(step.model[0].calls) > leap_at


def test_and_not_more_than_that():
    step, _ = warmed("mlp", sgd)
    step.model.insert(0, Shaky())
    weight = step.model[-1].weight
    assert "by more than those of several runs" in proven(step, lambda: weight.data.mul_(1.001))


def test_a_state_brings_back_what_it_has_seen():
    step, _ = warmed("branches")
    recording = recorded(step)
    state, before = recording.saved_state(), [tensor.clone() for tensor in step.state()]
    step()
    assert not equal(step.state(), before)
    state.restore()
    assert equal(step.state(), before)


# What planning must not do to the training ----------------------------------------------------------------------------


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


NOT_ITS_NUMBERS = "its numbers differ from those of the step"


def proofs(monkeypatch, *answers):
    """Has the proofs of a planner answer so, one after the other; gives the list of those that are left."""
    left = list(answers)
    monkeypatch.setattr("kitsune.launches.execution.equivalence.EquivalenceCheck.mismatch", lambda *_: left.pop(0))
    return left


def test_where_a_plan_is_refused_the_next_one_is_proven_and_says_so(monkeypatch):
    step, twin = warmed("branches", sgd)
    first = Planner(Recorder(CPU), 3)
    first.capture(step, step.inputs)
    twin()
    left = proofs(monkeypatch, NOT_ITS_NUMBERS, None)
    planner = Planner(Recorder(CPU), 3)
    graph, _ = planner.capture(step, step.inputs)
    twin()
    assert left == []
    assert planner.refusal == ""
    assert planner.plan.name.endswith(f"; a faster one was refused: {NOT_ITS_NUMBERS}")
    assert not planner.plan.name.startswith(first.plan.name)
    graph.replay()
    twin()
    assert equal(step.state(), twin.state())


def test_a_step_whose_plans_are_refused_stays_as_it_is(monkeypatch):
    left = proofs(monkeypatch, *[NOT_ITS_NUMBERS] * 5)
    step, twin = warmed("branches", sgd)
    planner = Planner(Recorder(CPU), 3)
    graph, _ = planner.capture(step, step.inputs)
    twin()
    assert graph is None
    assert len(left) == 5 - PROOFS
    assert planner.refusal == f"the planned launches do not do what the step does: {NOT_ITS_NUMBERS}"
    assert equal(step.state(), twin.state())


def test_the_one_plan_of_one_stream_is_proven_once(monkeypatch):
    left = proofs(monkeypatch, "no", "no")
    step, _ = warmed("branches", sgd)
    graph, _ = Planner(Recorder(CPU), 1).capture(step, step.inputs)
    assert graph is None
    assert len(left) == 1


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), IndexError("out of range"), KeyError(8), OfTheirOwn("every second")]
)
def test_whatever_planning_meets_the_step_has_run_once(monkeypatch, error):
    def failing(*_):
        raise error

    monkeypatch.setattr("kitsune.launches.execution.equivalence.EquivalenceCheck.mismatch", failing)
    step, twin = warmed("branches", sgd)
    planner = Planner(Recorder(CPU), 3)
    graph, result = planner.capture(step, step.inputs)
    expected = twin()
    assert graph is None
    assert planner.refusal.startswith(f"planning its launches failed: {type(error).__name__}: ")
    assert equal([result[0]], [expected[0]])
    assert equal(step.state(), twin.state())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda x: torch.nested.nested_tensor(list(x)).sin(), "nested"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
def test_tensors_that_are_more_than_their_bytes_are_refused(make, word):
    x = torch.randn(3, 4)
    found = record(lambda: make(x), CPU)
    assert found.recording is None
    assert word in found.refusal


def test_what_the_step_raises_in_a_further_run_is_a_reason_and_not_an_error():
    """As code does that counts its calls; the run that was recorded stands."""
    step, twin = warmed("branches", sgd)
    plain, calls = step.model.forward, []

    def forward(x):
        calls.append(len(calls))
        if len(calls) > 1:
            raise OfTheirOwn("called twice")
        return plain(x)

    step.model.forward = forward
    planner = Planner(Recorder(CPU), 3)
    graph, result = planner.capture(step, step.inputs)
    expected = twin()
    assert graph is None
    assert calls == [0, 1]
    assert planner.refusal == "planning its launches failed: OfTheirOwn: called twice"
    assert equal([result[0]], [expected[0]])
    assert equal(step.state(), twin.state())


def test_a_step_that_does_another_thing_every_time_is_refused():
    """Whatever its reason, as a generator that nobody knows of."""
    step, _ = warmed("mlp", sgd)
    plain, drawn = step.model.forward, random.Random(5)
    recording = recorded(step)
    step.model.forward = lambda x: plain(x) * drawn.choice([1.0, 3.0])
    replay = in_recorded_order(recording)
    with pytest.raises(ErraticError, match="something on the host decides"):
        why_refuted(recording, step, replay)


@pytest.mark.parametrize("over", [100, 10_000])
def test_a_step_whose_loss_drifts_by_a_count_on_the_host_is_refused(over):
    """By less than rounding could: but each run has numbers of its own, and the launches always the same."""
    step, _ = warmed("mlp", sgd)
    plain, calls = step.model.forward, itertools.count()
    recording = recorded(step)
    step.model.forward = lambda x: plain(x) * (1 + next(calls) / over)
    with pytest.raises(ErraticError, match="in each run, and its launches do not"):
        why_refuted(recording, step, in_recorded_order(recording))


def test_the_batch_of_the_proof_is_one_that_a_user_could_have():
    offsets, one_row = torch.tensor([0, 2, 2, 5]), torch.tensor([[50, 3]])
    one_category = torch.tensor([[9.0, 70.0, 500.0]])  # of ten, beside numbers that are none
    values = torch.arange(4.0)
    for number in range(3):
        reorder([offsets, values], number)
        reorder([one_row, torch.tensor([0.5])], number)
        reorder([one_category], number)
        assert 0 <= int(one_category[0, 0]) < 10
    assert offsets.tolist() == [0, 2, 2, 5]
    assert one_row.tolist() == [[50, 3]]
    assert sorted(values.tolist()) == [0.0, 1.0, 2.0, 3.0] != values.tolist()
