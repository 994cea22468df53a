"""A forward and its backward as two planned graphs, the second on what the first leaves. To the bit, on the twin."""

import pytest
import torch

from kitsune.device.cuda_graph import HostGraph, Recorder
from kitsune.launches.pipeline import Planner
from kitsune.launches.recording.copy_on_write import HIDDEN
from kitsune.launches.recording.recorder import record
from kitsune.launches.transforms.partition import crossing_of, first_half, second_half
from tests.unit.kitsune.launches.execution.test_graph_benchmark import Graphs
from tests.unit.kitsune.launches.steps import CASES, CPU, equal, even_us, sgd, warmed


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)


class Parts:
    """A model's forward and backward on a static batch and static gradients of its output."""

    def __init__(self, name):
        step, _ = warmed(name, sgd)
        self.model, self.x = step.model, step.inputs[0]
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.gradient = torch.randn(self.model(self.x).shape, generator=torch.Generator().manual_seed(1))

    def forward(self):
        self.live = self.model(self.x)
        return self.live.detach()

    def backward(self):
        live, self.live = self.live, None  # what the graph of autograd holds would be ours otherwise
        return torch.autograd.grad(live, self.weights, self.gradient, allow_unused=True)


def other_data(parts, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(parts.x), generator=generator)
    parts.x.copy_(parts.x[rows].clone())
    parts.gradient.copy_(torch.randn(parts.gradient.shape, generator=generator))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("streams", [1, 3])
def test_two_graphs_are_the_forward_and_its_backward(name, streams):
    parts, twin = Parts(name), Parts(name)
    planner = Planner(Recorder(CPU), streams)
    torch.manual_seed(3)
    one, two = planner.capture_pair(parts.forward, parts.backward, lambda: [parts.x, parts.gradient])
    assert planner.refusal == ""
    assert (max(one.plan.schedule.streams, two.plan.schedule.streams) > 1) == (streams > 1)
    for number in range(4):
        for each in (parts, twin):
            other_data(each, number)
        torch.manual_seed(number)
        one.graph.replay()
        two.graph.replay()
        torch.manual_seed(number)
        assert equal([one.static[0], *two.static], [twin.forward(), *twin.backward()])
    assert all(map(torch.equal, parts.model.buffers(), twin.model.buffers()))


def test_a_second_backward_finds_what_the_forward_left():
    parts = Parts("branches")
    one, two = Planner(Recorder(CPU), 3).capture_pair(parts.forward, parts.backward, lambda: [parts.x, parts.gradient])
    one.graph.replay()
    two.graph.replay()
    first = [gradient.clone() for gradient in two.static]
    two.graph.replay()
    assert equal(first, two.static)


def pair_of(planner, parts):
    inputs = [parts.x, parts.gradient]
    return planner.capture_pair(parts.forward, parts.backward, lambda: inputs, parts.weights)


def test_the_backward_is_timed_on_what_the_forward_makes_outside_of_its_graph(monkeypatch):
    """In a capture operations may leave on the GPU what they read on the host outside of one."""
    timed = []
    monkeypatch.setattr(
        "kitsune.launches.plans.measured_us", lambda recording: timed.append(dict(recording.held)) or even_us(recording)
    )
    one, two = pair_of(Planner(Recorder(CPU), 3), Parts("branches"))
    crossed = {number: tensor.untyped_storage().data_ptr() for number, tensor in one.static[1].items()}
    held = [(number, each[number].data_ptr()) for each in timed for number in crossed if number in each]
    assert held
    assert not crossed.items() & set(held)
    assert crossed.items() <= {(number, each.data_ptr()) for number, each in two.plan.recording.held.items()}


def test_the_plans_of_the_backward_race_on_what_the_forward_has_written(monkeypatch):
    """A capture runs nothing: before a replay of the forward, an index in what crosses may be any number."""
    recorder, order, replay = Graphs(), [], HostGraph.replay
    monkeypatch.setattr(HostGraph, "replay", lambda graph: order.append(graph) or replay(graph))
    planner = Planner(recorder, 3)
    planner.race.clock = lambda graph: order.append(graph) or 10.0
    assert pair_of(planner, Parts("branches")) is not None
    forward, _ = recorder.kept
    of_the_backward = recorder.made[recorder.made.index(forward) + 1 :]
    first = next(at for at, graph in enumerate(order) if graph in of_the_backward)
    assert forward in order[:first]


def test_where_the_quickest_backward_is_refused_the_next_one_is_proven_and_says_so(monkeypatch):
    parts, twin = Parts("branches"), Parts("branches")
    first = Planner(Recorder(CPU), 3)
    pair_of(first, parts)
    left = ["not today", None]
    monkeypatch.setattr("kitsune.launches.execution.equivalence.EquivalenceCheck.mismatch", lambda *_: left.pop(0))
    planner = Planner(Recorder(CPU), 3)
    one, two = pair_of(planner, parts)
    assert left == []
    assert planner.plan is two.plan
    assert two.plan.name.endswith("; a faster one was refused: not today")
    assert not two.plan.name.startswith(first.plan.name)
    one.graph.replay()
    two.graph.replay()
    assert equal([one.static[0], *two.static], [twin.forward(), *twin.backward()])


def test_where_every_backward_is_refused_no_run_leaves_a_trace(monkeypatch):
    parts, twin = Parts("branches"), Parts("branches")
    monkeypatch.setattr("kitsune.launches.execution.equivalence.EquivalenceCheck.mismatch", lambda *_: "not today")
    planner = Planner(Recorder(CPU), 3)
    assert pair_of(planner, parts) is None
    assert planner.refusal == "the planned launches do not do what the step does: not today"
    assert all(map(torch.equal, parts.model.buffers(), twin.model.buffers()))


def test_what_could_not_be_put_back_is_not_run(monkeypatch):
    monkeypatch.setattr("kitsune.launches.pipeline.are_hidden", bool)
    planner = Planner(Recorder(CPU), 3)
    assert planner.capture_pair(lambda: 1 / 0, lambda: 1 / 0, list, [torch.ones(1)]) is None
    assert planner.refusal == HIDDEN


def test_an_empty_tensor_crosses_too():
    """As the reserve of cuDNN's batch norm does."""
    x = torch.randn(4, 3)
    made = []

    def first():
        made[:] = [x * 2, x[:0] * 2]
        return made[0]

    def second():
        return torch.cat([made[0] + 1, made[1]])

    one, two = Planner(Recorder(CPU), 2).capture_pair(first, second, lambda: [x])
    x.fill_(3.0)
    one.graph.replay()
    two.graph.replay()
    assert equal([two.static], [torch.full((4, 3), 7.0)])


def test_each_half_has_the_launches_and_the_memory_of_its_own():
    parts = Parts("branches")
    found = record(parts.forward, CPU, parts.backward)
    first, whole = first_half(found.recording, found.cut), found.recording
    crossing = crossing_of(whole, found.cut)
    second = second_half(whole, found.cut, {number: torch.empty(1) for number in crossing})
    assert 0 < found.cut < len(whole.calls)
    assert (*first.calls, *second.calls) == whole.calls
    assert crossing
    assert set(first.result[1]) == crossing
    assert all(first.graph.storages[number].is_kept for number in crossing)
    assert not any(second.graph.storages[number].is_own for number in crossing)
    made = [storage for half in (first, second) for storage in half.graph.storages if storage.is_own]
    both = zip(whole.graph.storages, whole.graph.touchers(), strict=True)
    assert len(made) == sum(storage.is_own and bool(touchers) for storage, touchers in both)


def test_what_cannot_be_followed_in_either_part_is_refused():
    parts = Parts("mlp")
    planner = Planner(Recorder(CPU), 2)
    assert planner.capture_pair(parts.forward, lambda: float(parts.live.detach().sum()), lambda: [parts.x]) is None
    assert "depends on the data" in planner.refusal


class OfTheirOwn(Exception):
    """Of the user's code: derives from nothing that anybody else raises."""


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("at", [1, 2])
def test_what_a_part_raises_is_a_reason_and_leaves_no_trace(part, at):
    parts = Parts("branches")
    plain, calls = getattr(parts, part), []
    before = [buffer.clone() for buffer in parts.model.buffers()]

    def raising():
        calls.append(len(calls))
        if len(calls) == at:
            raise OfTheirOwn("not like this")
        return plain()

    setattr(parts, part, raising)
    planner = Planner(Recorder(CPU), 2)
    assert planner.capture_pair(parts.forward, parts.backward, lambda: [parts.x, parts.gradient]) is None
    assert planner.refusal == "planning its launches failed: OfTheirOwn: not like this"
    assert len(calls) == at
    assert all(map(torch.equal, parts.model.buffers(), before))


def test_parts_that_are_not_what_was_recorded_are_found_out():
    parts = Parts("mlp")
    planner = Planner(Recorder(CPU), 2)
    plain = parts.backward
    parts.backward = lambda: [gradient * float(parts.x.numpy()[0, 0]) for gradient in plain()]
    assert planner.capture_pair(parts.forward, parts.backward, lambda: [parts.x, parts.gradient]) is None
    assert "differ from those of the step" in planner.refusal
