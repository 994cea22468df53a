"""TrainStep: hyperparameters that change, and loss scaling."""

import copy
import itertools

import pytest
import torch
import torch._inductor.exc
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from kitsune.amp import ScalerStatistics
from tests.step_cases import (
    LR,
    OPTIMIZERS,
    adamw,
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


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=LR * 4, total_steps=40),
}


@pytest.mark.parametrize("built", ["before", "after", "settled"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.on_streams
def test_a_scheduler_is_honoured_at_every_step(device, capture, schedule, built):
    make = OPTIMIZERS["adamw by hand fused"]
    planned, plain = pair(device, {}, optimizer=make)
    planned.step.close()
    if built == "before":
        planned.schedule(SCHEDULES[schedule])
    planned.start({"capture": capture})
    if built == "settled":
        train_both(planned, plain, batches(STEPS))
    if built != "before":
        planned.schedule(SCHEDULES[schedule])
    plain.schedule(SCHEDULES[schedule])
    train_both(planned, plain, batches(STEPS + 2))
    assert_same(planned, plain)
    assert is_captured(planned.step)
    outside = [note for note in planned.step.report.notes if "hyperparameter other than the learning rate" in note]
    assert bool(outside) == (schedule == "one cycle")  # it cycles the betas too


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("update", ["given", "kitsune"])
@pytest.mark.on_streams
def test_weight_decay_may_change_in_mid_run(device, capture, update):
    planned, plain = pair(device, {"capture": capture, "update": update})
    many = batches(STEPS + 6)
    train_both(planned, plain, many[:STEPS])
    for run in (planned, plain):
        run.optimizer.param_groups[0]["weight_decay"] = 0.5
    train_both(planned, plain, many[STEPS:])
    assert_same(planned, plain, **KERNEL[update])
    assert any("hyperparameter other than the learning rate" in note for note in planned.step.report.notes)


@pytest.mark.on_streams
def test_two_graphs_follow_one_learning_rate(device):
    planned, plain = pair(device, {"capture": "step"}, optimizer=OPTIMIZERS["adamw by hand fused"])
    small, large = batches(30, 3, 8), batches(30, 6, 8)
    train_both(planned, plain, large[:5])
    train_both(planned, plain, small[:14])
    assert len(planned.step._programs) == 2
    assert planned.step.is_settled
    for count in range(4):
        for run in (planned, plain):
            run.optimizer.param_groups[0]["lr"] = LR / 2**count
        train_both(planned, plain, [large[10 + count], small[20 + count]])
    assert_same(planned, plain)


@pytest.mark.parametrize("update", ["given", "kitsune"])
def test_a_hook_on_the_optimizer_runs_at_every_step(device, update):
    optimizer = OPTIMIZERS["adamw by hand fused"] if update == "given" else adamw
    planned, plain = pair(device, {"capture": "step", "update": update}, optimizer=optimizer)
    many, calls = batches(STEPS + 4), []
    train_both(planned, plain, many[:STEPS])
    planned.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train_both(planned, plain, many[STEPS:])
    assert len(calls) == 4
    assert_same(planned, plain, **KERNEL[update])
    assert any("hook on optimizer.step" in note for note in planned.step.report.notes)


# fp16 -----------------------------------------------------------------------------------------------------------------


SKIPPING = [adamw, sgd, lambda params: torch.optim.SGD(params, lr=LR)]


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.parametrize(
    ("update", "optimizer"), [*itertools.product(["given", "fused"], SKIPPING), ("kitsune", adamw)]
)
@pytest.mark.parametrize("overflow", [0, 6])
@pytest.mark.on_streams
def test_an_overflow_skips_one_step_and_halves_the_scale(device, capture, update, optimizer, overflow):
    knobs = {"precision": "fp16", "capture": capture, "update": update}
    planned, _ = pair(device, knobs, optimizer=optimizer)
    many = batches(10)
    before: dict[str, torch.Tensor] = {}
    for index, (x, y) in enumerate(many):
        before = copy.deepcopy(planned.model.state_dict())
        planned.train([(x * 1e30 if index == overflow else x, y)])
        changed = any(not torch.equal(before[key], value) for key, value in planned.model.state_dict().items())
        assert changed == (index != overflow)
    scaler = planned.step._applied.build.scaler
    assert scaler.skipped.item() == 1
    assert scaler.scale.item() == 32768.0
    assert planned.step.report.scaler == ScalerStatistics(steps=10, skipped=1, scale=32768.0)
    assert "1 of 10 steps skipped, scale 32768" in str(planned.step.report)
    assert all(torch.isfinite(parameter).all() for parameter in planned.model.parameters())
    assert not planned.step.report.declined
    assert is_captured(planned.step) == (capture != "none")


@pytest.mark.on_streams
def test_the_scale_outlives_a_new_assembly(device):
    planned, _ = pair(device, {"precision": "fp16", "capture": "step", "update": "fused"})
    (x, y), *rest = batches(STEPS)
    planned.train([(x * 1e30, y), *rest])
    planned.model.first.requires_grad_(False)
    planned.train(rest)
    assert planned.step._applied.build.scaler.scale.item() == 32768.0
    assert planned.step._applied.build.scaler.skipped.item() == 1
