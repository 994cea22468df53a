"""accumulation: parts of a batch one after the other compute what the whole batch does, and keep less."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune import KitsuneOptimizer, Plan, TrainStep
from kitsune.knobs import KNOBS
from kitsune.techniques.accumulation import IN_LOOP
from kitsune.workload import Workload
from tests.step_cases import sgd
from tuner.building.host_memory import peak_of_step

ROWS, WIDTH = 64, 32
COUNTS = tuple(choice for choice in KNOBS["accumulation"].choices if choice != 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 5)
    )


def batch(rows: int = ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(5, (rows,), generator=generator)


def trained(rows: int = ROWS, loss_fn=F.cross_entropy, **knobs):
    """Losses and the last gradients of three steps, the report, and the peak of one more."""
    model = network()
    optimizer = sgd(model.parameters())
    x, y = batch(rows)
    with TrainStep(model, loss_fn, optimizer, Plan.by_hand(**knobs)) as step:
        losses = [step(x, y).item() for _ in range(3)]
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        peak_bytes = peak_of_step(lambda: step(x, y), Workload(model, loss_fn, optimizer, (x, y)))
        return (losses, gradients), step.report, peak_bytes


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rows", [ROWS, 13])
def test_parts_compute_what_the_whole_batch_does(count, rows):
    plain, _, _ = trained(rows)
    found, report, _ = trained(rows, accumulation=count)
    assert report.applied == {"accumulation": count}
    torch.testing.assert_close(found, plain)


def test_more_parts_need_less_memory():
    peaks = [trained(4096, **knobs)[2] for knobs in ({}, *({"accumulation": count} for count in COUNTS))]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 0.8 * peaks[0]


def test_parts_of_the_plan_are_parts_of_the_parts_that_the_user_asks_for():
    shapes = []

    class Seen(nn.Linear):
        def forward(self, x):
            shapes.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Seen(WIDTH, 5))
    plan = Plan.by_hand(accumulation=4)
    with TrainStep(model, F.cross_entropy, sgd(model.parameters()), plan, accumulation_steps=2) as step:
        step(*batch())
    assert shapes == [ROWS // 8] * 8


def test_a_batch_of_fewer_rows_has_fewer_parts():
    found, report, _ = trained(2, accumulation=8)
    torch.testing.assert_close(found, trained(2)[0])
    assert not report.declined


def test_with_batch_norm_it_is_declined():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    with TrainStep(model, F.cross_entropy, sgd(model.parameters()), Plan.by_hand(accumulation=2)) as step:
        step(*batch())
        assert step.report.declined == {"accumulation": "batch norm would take its statistics from each part"}


def test_a_loop_of_the_users_own_is_told_to_split_its_batches():
    model = network()
    optimizer = KitsuneOptimizer(sgd(model.parameters()), plan=Plan.by_hand(accumulation=2))
    x, y = batch()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert IN_LOOP in str(optimizer.report)
    optimizer.close()
