"""TrainStep: the update by a kernel of Kitsune."""

import pytest
import torch
import torch._inductor.exc
from torch.optim.lr_scheduler import StepLR

from tests.step_cases import (
    LR,
    OPTIMIZERS,
    assert_same,
    batches,
    is_captured,
    pair,
    sgd,
    train_both,
)

CAPTURES = ["step", "segments"]
STEPS = 8  # three to warm up, one to capture, four to replay
KERNEL = {"given": {}, "kitsune": {"rtol": 1e-4, "atol": 1e-5}}


#: It rounds in another order than any of torch's implementations.


def grouped(params):
    """Two groups of which no hyperparameter is the same, and what is their own changes by schedulers."""
    weights, biases = ([one for one in params if (one.dim() > 1) == is_weight] for is_weight in (True, False))
    return torch.optim.AdamW(
        [
            {"params": weights, "lr": torch.tensor(LR), "weight_decay": 0.5},
            {"params": biases, "lr": LR / 4, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
        ]
    )


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
def test_the_kernel_follows_groups_of_parameters_and_their_schedules(device, capture):
    planned, plain = pair(device, {"capture": capture, "update": "kitsune"}, optimizer=lambda p: grouped([*p]))
    for run in (planned, plain):
        run.schedule(lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    train_both(planned, plain, batches(STEPS + 2))
    assert_same(planned, plain, **KERNEL["kitsune"])
    assert planned.step.report.applied["update"] == "kitsune"
    assert is_captured(planned.step) == (capture != "none")


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
def test_the_kernel_counts_the_steps_of_each_parameter(device, capture):
    """Those without a gradient stay behind, also where they and others come and go."""
    planned, plain = pair(device, {"capture": capture, "update": "kitsune"})
    many = batches(15)
    for start, frozen in ((0, True), (5, False), (10, True)):
        for run in (planned, plain):
            run.model.first.requires_grad_(not frozen)
        train_both(planned, plain, many[start : start + 5])
        assert_same(planned, plain, **KERNEL["kitsune"])
    states = [[run.optimizer.state[one] for one in run.model.parameters()] for run in (planned, plain)]
    assert [int(state["step"]) for state in states[0]] == [5, 5, 15, 15]
    for ours, theirs in zip(*states, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, **KERNEL["kitsune"], check_device=name != "step")
    assert is_captured(planned.step) == (capture != "none")


def test_adam_without_decay_is_updated_by_the_kernel_too(device):
    planned, plain = pair(device, {"capture": "step", "update": "kitsune"}, optimizer=OPTIMIZERS["adam"])
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain, **KERNEL["kitsune"])
    assert planned.step.report.applied == {"capture": "step", "update": "kitsune"}


def test_the_kernel_is_not_for_every_optimizer(device):
    planned, plain = pair(device, {"update": "kitsune"}, optimizer=sgd)
    train_both(planned, plain, batches(2))
    assert_same(planned, plain)
    assert "slower than Inductor's" in planned.step.report.declined["update"]
