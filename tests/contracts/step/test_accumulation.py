"""TrainStep: steps over parts of a batch."""

import copy

import pytest
import torch
import torch._inductor.exc

from kitsune.errors import SettingsError, WorkloadError
from tests.step_cases import (
    Accumulating,
    Convnet,
    Mlp,
    assert_same,
    batches,
    is_captured,
    pair,
    train_both,
)

CAPTURES = ["step", "segments"]
IMAGES = (4, 3, 8, 8)
STEPS = 8  # three to warm up, one to capture, four to replay


def accumulating_pair(device, capture, parts, **options):
    planned, plain = pair(device, {"capture": capture}, accumulation_steps=parts, **options)
    other = Accumulating(plain.model, plain.optimizer, plain.loss_fn, plain.clip)
    other.parts = parts
    return planned, other


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
@pytest.mark.parametrize("parts", [2, 4])  # of six rows: 3 and 3; 2, 2, 1 and 1
@pytest.mark.on_streams
def test_gradients_of_parts_of_a_batch_add_up(device, capture, parts):
    planned, plain = accumulating_pair(device, capture, parts, clip=0.05, model=lambda: Mlp(dropout=0.25))
    train_both(planned, plain, batches(STEPS))
    assert_same(planned, plain)
    assert is_captured(planned.step) == (capture != "none")


def test_statistics_of_batch_norm_see_every_part(device):
    planned, plain = accumulating_pair(device, "step", 2, model=Convnet)
    train_both(planned, plain, batches(STEPS, *IMAGES))
    assert_same(planned, plain)
    assert is_captured(planned.step)


@pytest.mark.on_streams
def test_fewer_rows_than_parts(device):
    planned, plain = accumulating_pair(device, "step", 4)
    train_both(planned, plain, batches(STEPS, 4, 8))
    plain.parts = 3
    train_both(planned, plain, batches(2, 3, 8))
    assert_same(planned, plain)


@pytest.mark.parametrize("capture", ["none", *CAPTURES])
def test_an_overflow_in_one_part_skips_the_whole_step(device, capture):
    knobs = {"precision": "fp16", "capture": capture, "update": "fused"}
    planned, _ = pair(device, knobs, accumulation_steps=2)
    for index, (x, y) in enumerate(batches(8)):
        before = copy.deepcopy(planned.model.state_dict())
        if index == 6:
            x[:2] *= 1e30
        planned.train([(x, y)])
        changed = any(not torch.equal(before[key], value) for key, value in planned.model.state_dict().items())
        assert changed == (index != 6)
    assert planned.step._applied.build.scaler.skipped.item() == 1


@pytest.mark.parametrize("steps", [0, -1, 2.0, "2"])
def test_accumulation_over_no_number_of_steps_is_refused(device, steps):
    with pytest.raises(SettingsError, match="accumulation_steps is"):
        pair(device, {}, accumulation_steps=steps)


def test_a_batch_without_rows_cannot_be_split(device):
    planned, _ = pair(device, {}, accumulation_steps=2)
    with pytest.raises(WorkloadError, match="this one has none in sight"):
        planned.step(torch.tensor(1.0, device=device), None)
