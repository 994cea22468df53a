"""What the proof of a plan must find, and what it must accept."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from kitsune.device.cuda_graph import Recorder
from kitsune.errors import ErraticError
from kitsune.launches.execution.equivalence import reorder
from kitsune.launches.execution.issue import HostLane, in_recorded_order, issue
from kitsune.launches.pipeline import Planner
from kitsune.launches.planning.memory_plan import plan_memory
from kitsune.launches.planning.schedule import in_order
from tests.unit.kitsune.launches.steps import CPU, equal, recorded, sgd, warmed, why_refuted

pytestmark = pytest.mark.usefixtures("even")


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


def test_an_input_that_the_step_reshapes_is_restored_and_so_are_the_weights() -> None:
    layer = nn.Linear(4, 4)
    twin = copy.deepcopy(layer)
    x = torch.randn(8, 4)
    given = x.clone()

    def step() -> torch.Tensor:
        x.unsqueeze_(0)
        return trained(layer, x)

    planner = Planner(Recorder(CPU), 2)
    planner.capture(step, (x,))
    trained(twin, given)
    assert torch.equal(layer.weight, twin.weight), "one step, whatever the proof did"


def trained(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    layer.zero_grad(set_to_none=True)
    loss = layer(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(0.1 * parameter.grad)
    return loss.detach()
