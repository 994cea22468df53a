"""TrainStep: models that change in mid-run."""

import copy

import pytest
import torch
import torch._inductor.exc
from torch import nn

from tests.step_cases import (
    LR,
    OPTIMIZERS,
    Convnet,
    Mlp,
    adamw,
    assert_same,
    batches,
    is_captured,
    pair,
    train_both,
)

CAPTURES = ["step", "segments"]
IMAGES = (4, 3, 8, 8)
STEPS = 8  # three to warm up, one to capture, four to replay
KERNEL = {"given": {}, "kitsune": {"rtol": 1e-4, "atol": 1e-5}}


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.on_streams
def test_evaluation_in_between(device, capture):
    planned, plain = pair(device, {"capture": capture}, model=Convnet)
    many = batches(STEPS, *IMAGES)
    for batch in many:
        train_both(planned, plain, [batch])
        outputs = []
        for run in (planned, plain):
            run.model.eval()
            with torch.no_grad():
                outputs.append(run.model(many[0][0].to(device)))
            run.model.train()
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    assert_same(planned, plain)
    assert is_captured(planned.step) == (capture != "none")


def test_steps_of_a_model_in_evaluation_mode(device):
    planned, plain = pair(device, {"capture": "step"}, model=lambda: Mlp(dropout=0.5))
    train_both(planned, plain, batches(STEPS))
    for run in (planned, plain):
        run.model.eval()
    train_both(planned, plain, batches(2))
    for run in (planned, plain):
        run.model.train()
    train_both(planned, plain, batches(2))
    assert_same(planned, plain)


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.on_streams
def test_freezing_and_thawing_in_mid_run(device, capture, frozen_first):
    planned, plain = pair(device, {"capture": capture})
    many = batches(15)
    for start, frozen in ((0, frozen_first), (5, not frozen_first), (10, frozen_first)):
        for run in (planned, plain):
            run.model.first.requires_grad_(not frozen)
        train_both(planned, plain, many[start : start + 5])
        assert_same(planned, plain)
    assert is_captured(planned.step) == (capture != "none")


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.parametrize("update", ["given", "kitsune"])
@pytest.mark.on_streams
def test_replacing_a_layer_in_mid_run(device, capture, update):
    planned, plain = pair(device, {"capture": capture, "update": update})
    many = batches(STEPS + 6)
    train_both(planned, plain, many[:STEPS])
    torch.manual_seed(5)
    planned.model.last = nn.Linear(16, 4).to(device)
    plain.model.last = copy.deepcopy(planned.model.last)
    for run in (planned, plain):
        run.optimizer.add_param_group({"params": list(run.model.last.parameters())})
    train_both(planned, plain, many[STEPS:])
    assert_same(planned, plain, **KERNEL[update])


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.on_streams
def test_loading_weights_in_mid_run(device, capture):
    planned, plain = pair(device, {"capture": capture}, model=Convnet)
    many = batches(STEPS, *IMAGES)
    early = copy.deepcopy(plain.model.state_dict())
    for assign in (False, True):
        train_both(planned, plain, many)
        for run in (planned, plain):
            run.model.load_state_dict(copy.deepcopy(early), assign=assign)
            if assign:
                run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
    train_both(planned, plain, many)
    assert_same(planned, plain)


@pytest.mark.parametrize("knobs", [{}, {"update": "fused"}, {"update": "kitsune"}])
@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.on_streams
def test_loading_an_optimizer_checkpoint_in_mid_run(device, capture, knobs):
    optimizer = OPTIMIZERS["adamw by hand fused"] if not knobs else adamw
    planned, plain = pair(device, {"capture": capture, **knobs}, optimizer=optimizer)
    many = batches(STEPS)
    train_both(planned, plain, many[:2])
    early = copy.deepcopy(plain.optimizer.state_dict())
    early["param_groups"][0]["lr"] = LR / 2
    train_both(planned, plain, many)
    for run in (planned, plain):
        run.optimizer.load_state_dict(copy.deepcopy(early))
        assert run.optimizer.param_groups[0]["lr"] == LR / 2
    train_both(planned, plain, many)
    if knobs:
        assert_same(planned, plain, rtol=1e-4, atol=1e-6)
    else:
        assert_same(planned, plain)
    assert is_captured(planned.step) == (capture != "none")
