"""TrainStep on a CPU: what tests/contracts/step does not cover, with the CPU twin of captured graphs."""

import time
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune import Plan, TrainStep, Workload
from kitsune.errors import SettingsError, WorkloadError
from kitsune.techniques.prefetch import NO_LOADER
from kitsune.workload import move_batch
from tests.step_cases import capturing_cpu


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return capturing_cpu(monkeypatch)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"clip_grad_norm": 0}, SettingsError, "greater than 0"),
        ({"clip_grad_norm": -1.0}, SettingsError, "greater than 0"),
        ({"clip_grad_norm": float("nan")}, SettingsError, "greater than 0"),
        ({"plan": "plan.json"}, SettingsError, "Plan.load"),
        ({"optimizer": "adam"}, WorkloadError, "torch.optim.Optimizer"),
        ({"optimizer": torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])}, WorkloadError, "closure"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)}, WorkloadError, "none of"),
        ({"model": len}, WorkloadError, "torch.nn.Module"),
        ({"loss_fn": "ce"}, WorkloadError, "loss_fn is 'ce'"),
    ],
)
def test_arguments_that_cannot_be_meant(change, error, text):
    model = torch.nn.Linear(2, 2)
    usual = {"model": model, "loss_fn": None, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(error, match=text):
        TrainStep(**{**usual, **change})


@pytest.mark.parametrize(("ahead", "first"), [(0, 1), (4, 5)])
def test_a_loader_comes_ahead_of_its_steps_as_the_plan_says(ahead, first):
    taken = []

    def loader():
        for number in range(8):
            taken.append(number)
            yield torch.full((4, 8), float(number)), torch.zeros(4, dtype=torch.int64)

    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, torch.nn.functional.cross_entropy, optimizer, Plan.by_hand(prefetch=ahead))
    assert "prefetch" not in step.report.applied
    assert (NO_LOADER in step.report.notes) == bool(ahead)
    batches = iter(step.batches(loader()))
    assert step.report.applied == ({"prefetch": ahead} if ahead else {})
    assert NO_LOADER not in step.report.notes
    batch = next(batches)
    deadline_s = time.monotonic() + 10
    while len(taken) < first and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert len(taken) == first
    assert all(step(*batch).isfinite() for batch in (batch, *batches))
    assert len(taken) == 8


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, data, labels):
        return F.cross_entropy(self.layer(data), labels)


def test_arguments_may_come_in_a_mapping_of_another_class():
    """As transformers' BatchEncoding is, which data collators return."""
    batches = [UserDict(data=torch.randn(16, 8), labels=torch.randint(4, (16,))) for _ in range(3)]
    model, twin = Named(), Named()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    workload = Workload(model, None, torch.optim.SGD(model.parameters(), lr=0.1), (batches[0], None))
    assert workload.batch == (dict(batches[0]), None)
    assert move_batch((batches[0], None), "meta")[0]["data"].is_meta
    with TrainStep(model, None, workload.optimizer) as step:
        for batch in batches:
            optimizer.zero_grad()
            loss = twin(**batch)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(step(batch), loss.detach())
    torch.testing.assert_close(model.layer.weight, twin.layer.weight)
