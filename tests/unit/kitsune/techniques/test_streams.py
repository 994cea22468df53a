"""The knob `streams`: what it needs, what it does to a step, and what happens where it cannot be had."""

import contextlib

import pytest
import torch

from kitsune import Plan, TrainStep
from kitsune.errors import DeclinedError
from kitsune.knobs import KNOBS
from kitsune.launches.recording.triton_adapter import why_unknown
from kitsune.techniques import TECHNIQUES, Facts, why_not
from tests.step_cases import OPTIMIZERS, assert_same, batches, capturing_cpu, is_captured, pair, train_both

ON_FOUR = {"capture": "step", "streams": 4}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU on which steps are captured and scheduled, as on a GPU."""
    monkeypatch.setattr(TECHNIQUES["streams"], "why_not", lambda choice, facts: None)
    return capturing_cpu(monkeypatch)


def test_a_plan_on_four_streams_trains_as_the_plain_loop(device):
    planned, plain = pair(device, ON_FOUR, optimizer=OPTIMIZERS["sgd"])
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert is_captured(planned.step)
    assert planned.step.report.applied == ON_FOUR


def test_launches_that_cannot_be_planned_leave_the_graph_and_say_why(device):
    planned, plain = pair(device, ON_FOUR, optimizer=OPTIMIZERS["adamw"])  # it asks the host for its step on a CPU
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert is_captured(planned.step)
    assert planned.step.report.applied == {"capture": "step"}
    assert "depends on the data" in planned.step.report.declined["streams"]


def test_declining_raises_once_where_that_was_asked_for_and_the_training_goes_on(device):
    planned, plain = pair(device, ON_FOUR, optimizer=OPTIMIZERS["adamw"], on_decline="raise")
    raised = []
    for batch in batches(10):
        with contextlib.suppress(DeclinedError):
            raised.append(batch)
            planned.train([batch])
            raised.pop()
    plain.train(batches(10))
    assert len(raised) == 1
    assert all(map(torch.equal, planned.step.model.parameters(), plain.model.parameters()))


def test_streams_go_when_the_graph_that_they_need_goes(monkeypatch):
    step = TrainStep(*small(), plan=Plan.by_hand(**ON_FOUR))
    assert step.report.declined["capture"] == "CUDA graphs need a GPU"
    assert step.report.declined["streams"] == "streams need a GPU"
    monkeypatch.setattr(TECHNIQUES["streams"], "why_not", lambda choice, facts: None)
    step = TrainStep(*small(), plan=Plan.by_hand(**ON_FOUR))
    assert step.report.declined["streams"].startswith("capture=none: only launches that are captured")
    assert step.report.applied == {}


def small():
    model = torch.nn.Linear(4, 2)
    return model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_versions_of_torch_that_were_looked_at(version):
    assert why_unknown(version) is None


@pytest.mark.parametrize("version", ["2.10.2", "2.14.0.dev20261101+cu130", "3.0.0"])
def test_another_version_of_torch_is_declined_with_the_reason(version, monkeypatch):
    monkeypatch.setattr("torch.__version__", version)
    cuda = Facts(device="cuda")
    reasons = {why_not("streams", choice, cuda) for choice in KNOBS["streams"].choices}
    assert reasons == {None, f"launches are followed in torch 2.11 to 2.13; this is {version}"}
