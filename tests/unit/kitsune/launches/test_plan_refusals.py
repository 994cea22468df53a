"""What planning must not do to the training: a plan that is refused or fails leaves the step as it is."""

import pytest
import torch

from kitsune.device.cuda_graph import Recorder
from kitsune.launches.pipeline import PROOFS, Planner
from kitsune.launches.recording.recorder import record
from tests.unit.kitsune.launches.steps import CPU, equal, sgd, warmed

pytestmark = pytest.mark.usefixtures("even")


class OfTheirOwn(Exception):
    """Of the user's code: derives from nothing that anybody else raises."""


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
