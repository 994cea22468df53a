"""What is set for the time of a step only, as TF32 is: launches that were recorded in it are issued again with it.

The proof tells. A captured graph has it for good, where its CPU twin asks again at every replay.
"""

import contextlib

import pytest
import torch
from torch import nn

from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.capture.step_body import Body
from kitsune.capture.step_graph import StepGraph
from kitsune.device.cuda_graph import Recorder
from kitsune.update.optimizer_update import Update
from tests.unit.kitsune.launches.steps import CPU, even_us

FACTOR = [1.0]


@torch.library.custom_op("kitsune_test::by_mode", mutates_args=())
def by_mode(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR[0]


@contextlib.contextmanager
def doubled():
    before, FACTOR[0] = FACTOR[0], 2.0
    try:
        yield
    finally:
        FACTOR[0] = before


class ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.right(torch.relu(self.left(x)) + by_mode(x.detach()))


def made():
    torch.manual_seed(0)
    model = ByMode()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True)


def whole_step():
    model, optimizer = made()
    body = Body(model, lambda x, y: nn.functional.mse_loss(model(x), y), Update(optimizer), step_contexts=[doubled])
    return StepGraph(body, Recorder(CPU), CPU, None, 3)


def data(count=8):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(count)]


@pytest.fixture(autouse=True)
def even_costs(monkeypatch):
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)


def test_a_step_on_several_streams():
    graph = whole_step()
    for batch in data():
        graph(batch)
    assert graph.streams_refusal == ""
    assert graph.plan.schedule.streams > 1


def test_the_step_that_explain_records():
    found = whole_step().recorded(data(1)[0])
    assert found.refusal == ""
    assert found.recording is not None


def test_forward_and_backward_on_several_streams():
    model, optimizer = made()
    forward = SegmentedForward(model, optimizer, model, model, CPU, capture=True, streams=3, step_contexts=[doubled])
    for x, y in data():
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x), y).backward()
        optimizer.step()
    assert forward.streams_refusal == ""
    assert forward.counts["captured"] > 0
    assert forward.plan is not None
