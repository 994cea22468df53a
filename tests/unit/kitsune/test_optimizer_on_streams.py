"""The drop-in with planned launches: what tests/optimizer_semantics.py says of captured loops, on three streams.

On the CPU twin: forward and backward are recorded, scheduled, captured on threads and proven to the bit.
"""

import pytest
import torch
from torch import nn

from kitsune.engine.dispatch import SegmentedForward
from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from kitsune.techniques import TECHNIQUES
from tests.optimizer_semantics import *  # noqa: F403
from tests.step_cases import Convnet, assert_same, batches, capturing_cpu, pair, train_both
from tests.unit.engine.steps import even_us

MADE: list[SegmentedForward] = []


class OnStreams(SegmentedForward):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **{**named, "streams": 3})
        MADE.append(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr("kitsune.loop.SegmentedForward", OnStreams)
    monkeypatch.setattr("kitsune.engine.planned.measured_us", even_us)
    MADE.clear()
    return capturing_cpu(monkeypatch)


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU on which the knobs themselves apply."""
    for name in ("streams", "pool_bytes"):
        monkeypatch.setattr(TECHNIQUES[name], "why_not", lambda choice, facts: None)
    monkeypatch.setattr("kitsune.engine.planned.measured_us", even_us)
    return capturing_cpu(monkeypatch)


class Towers(nn.Module):
    """Two branches beside each other; `asks`: it reads a number of its own on the host in every forward."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(()))
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(self.scale) if self.asks else 1.0
        return self.last(torch.tanh(self.left(x)) * torch.relu(self.right(x)) * scale)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> list[torch.Tensor]:
    for x, y in batches(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def towers(**options) -> Towers:
    torch.manual_seed(0)
    return Towers(**options)


def test_num_streams_by_hand(knob):
    plain, model = towers(), towers()
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3, memory_pool_size="1GB")
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, trained(model, optimizer), expected))
    report = optimizer.report
    assert report.applied == {"capture": "segments", "streams": 3, "pool_bytes": 2**30}
    assert optimizer.scheduler.num_streams == 3
    assert "note      backward: " in str(report)
    assert " on 3 streams: " in str(report) or " on 2 streams: " in str(report)
    optimizer.close()


def test_before_anything_is_decided_there_is_one_stream(knob):
    optimizer = KitsuneOptimizer(torch.optim.SGD(towers().parameters(), lr=0.1), num_streams=3)
    assert optimizer.scheduler.num_streams == 1
    optimizer.close()


def test_launches_that_cannot_be_planned_leave_the_graphs_and_say_why(knob):
    plain, model = towers(asks=True), towers(asks=True)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, trained(model, optimizer), expected))
    assert optimizer.report.applied == {"capture": "segments"}
    assert "depends on the data" in optimizer.report.declined["streams"]
    assert optimizer.counts["captured"] > 0
    optimizer.close()


@pytest.mark.parametrize("model", [Towers, Convnet])
def test_segments_of_a_train_step_are_planned_too(knob, model):
    knobs = {"capture": "segments", "streams": 2}
    planned, plain = pair(knob, knobs, model=model)
    shape = (6, 3, 8, 8) if model is Convnet else (6, 8)
    train_both(planned, plain, batches(10, *shape))
    assert_same(planned, plain)
    assert planned.step.report.applied == knobs
    assert planned.step.report.picture is not None


def test_a_plan_of_a_whole_step_keeps_its_streams_in_the_loop(knob):
    model = towers()
    plan = Plan.by_hand(capture="step", streams=2)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    trained(model, optimizer)
    assert optimizer.report.applied == {"capture": "segments", "streams": 2}
    optimizer.close()


def test_everything_that_was_captured_was_planned(device):
    model = towers()
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), capture_graph=True)
    trained(model, optimizer)
    (forward,) = MADE
    assert forward.streams_refusal == ""
    assert forward.plan is not None
    assert forward.plan.schedule.streams > 1
    optimizer.close()
