"""The drop-in with planned launches: what tests/optimizer_semantics.py says of captured loops, on three streams.

On the CPU twin: forward and backward are recorded, scheduled, captured on threads and proven to the bit.
"""

import pytest
import torch

from kitsune.optimizer import KitsuneOptimizer
from kitsune.techniques import TECHNIQUES
from tests.optimizer_on_streams import *  # noqa: F403
from tests.optimizer_on_streams import MADE, OnStreams, towers, trained
from tests.optimizer_semantics import *  # noqa: F403
from tests.step_cases import capturing_cpu
from tests.unit.kitsune.launches.steps import even_us


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr("kitsune.runtime.drop_in_loop.SegmentedForward", OnStreams)
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
    MADE.clear()
    return capturing_cpu(monkeypatch)


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for name in ("streams", "pool_bytes"):
        monkeypatch.setattr(TECHNIQUES[name], "why_not", lambda choice, facts: None)
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
    return capturing_cpu(monkeypatch)


def test_launches_that_cannot_be_planned_leave_the_graphs_and_say_why(knob):
    plain, model = towers(knob, asks=True), towers(knob, asks=True)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, trained(model, optimizer), expected))
    assert optimizer.report.applied == {"capture": "segments"}
    assert "depends on the data" in optimizer.report.declined["streams"]
    assert optimizer.counts["captured"] > 0
    optimizer.close()
