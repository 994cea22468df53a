"""What planning and capturing may not overlook: memory that moves, generators of the user's, batches that are none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune import Plan, TrainStep
from kitsune.autograd.leaves import fresh_leaves
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import CaptureError
from kitsune.launches.execution.equivalence import reorder
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.pipeline import Planner
from kitsune.launches.recording.recorder import record
from tests.step_cases import batches, capturing_cpu
from tests.unit.kitsune.launches.steps import CPU


class Constrained(nn.Linear):
    """As max-norm layers do it."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.2)
        return super().forward(x)


def test_a_parameter_that_is_given_other_memory_is_seen():
    model = nn.Sequential(Constrained(8, 4))
    before = model[0].weight
    with pytest.raises(CaptureError, match=r"sets Constrained\.weight\.data to other memory"), fresh_leaves(model):
        model(torch.ones(2, 8))
    assert model[0].weight is before


def test_and_the_step_that_does_it_trains_as_given(monkeypatch):
    capturing_cpu(monkeypatch)
    ends = []
    for plan in (None, Plan.by_hand(capture="step")):
        torch.manual_seed(0)
        model = nn.Sequential(Constrained(8, 16), nn.Tanh(), nn.Linear(16, 4))
        step = TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.5, fused=True), plan)
        ends.append([step(*batch).item() for batch in batches(8)])
    assert ends[0] == ends[1]
    assert "Constrained.weight.data" in step.report.declined["capture"]


def test_a_generator_of_the_users_own_is_where_the_step_has_left_it():
    generator, twin = (torch.Generator().manual_seed(3) for _ in range(2))
    x = torch.zeros(4)
    planner = Planner(Recorder(CPU), 2)
    planner.capture(lambda: x + torch.randn(4, generator=generator), [x])
    torch.randn(4, generator=twin)
    assert torch.equal(generator.get_state(), twin.get_state())


def test_a_storage_that_changes_its_size_in_the_step_is_refused_and_all_else_put_back():
    weight, moved, x = torch.ones(4), torch.zeros(4), torch.randn(4)

    def step():
        storage = moved.untyped_storage()
        storage.resize_(16)
        moved.copy_(x)
        weight.add_(moved)
        storage.resize_(0)
        return weight * 2

    planner = Planner(Recorder(CPU), 2)
    graph, _ = planner.capture(step, [x])
    assert graph is None
    assert planner.refusal == "the step changes the size of a storage from before the step (`resize_`)"
    assert torch.equal(weight, 1 + x)


def test_an_operation_that_gives_something_else_when_it_is_issued_again_is_refused():
    def step():
        torch.set_default_dtype(torch.float64)
        try:
            zeros = torch.zeros(4)
        finally:
            torch.set_default_dtype(torch.float32)
        return zeros * 1

    recording = record(step, CPU).recording
    with pytest.raises(CaptureError, match=r"gives torch\.float32 \(4,\) when it is issued again"):
        in_recorded_order(recording)()


@pytest.mark.parametrize("labels", [(4,), (4, 4)])
def test_indices_of_tables_stay_with_their_table(labels):
    tables = torch.stack([torch.randint(10 * number, 10 * number + 10, (4,)) for number in range(6)])
    before = tables.clone()
    inputs = [torch.randn(4, 8), tables, torch.randn(labels)]
    first = inputs[0].clone()
    reorder(inputs, 1)
    assert torch.equal(tables, before)
    assert not torch.equal(inputs[0], first)


def test_a_batch_of_tables_alone_goes_by_its_labels():
    tables, labels = torch.arange(24).reshape(6, 4), torch.tensor([3, 1, 2, 0])
    reorder([tables, labels], 1)
    assert torch.equal(tables, torch.arange(24).reshape(6, 4))
    assert labels.tolist() != [3, 1, 2, 0]
