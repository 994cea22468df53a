"""A mask full of ones leaves the batch; what is padded, or no mask, stays as it is."""

import pytest
import torch

from kitsune.capture.micro_batches import micro_batches
from kitsune.device.static_batch import opaque_type, signature_of
from kitsune.open_masks import OpenMask, with_open_masks, with_tensors

IDS = torch.arange(6).view(2, 3)
PADDED = torch.tensor([[1, 1, 1], [0, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_a_mask_of_ones_comes_back_as_it_was(dtype):
    batch = {"input_ids": IDS, "attention_mask": torch.ones(2, 3, dtype=dtype), "labels": IDS}
    marked = with_open_masks(batch)
    assert marked["attention_mask"] == OpenMask("input_ids", dtype)
    assert list(marked) == list(batch) and isinstance(batch["attention_mask"], torch.Tensor)
    back = with_tensors(marked)
    torch.testing.assert_close(dict(back), batch)
    assert back["input_ids"] is IDS


def test_the_tensor_like_it_goes_before_it_and_splits_the_batch():
    batch = {"attention_mask": torch.ones(2, 3), "position_ids": torch.arange(3)[None], "input_ids": IDS}
    marked = with_open_masks(batch)
    assert list(marked) == ["input_ids", "attention_mask", "position_ids"]
    parts = [part for (part, _), _ in micro_batches((marked, None), 2)]
    assert [len(part["input_ids"]) for part in parts] == [1, 1]
    assert [with_tensors(part)["attention_mask"].shape for part in parts] == [(1, 3), (1, 3)]


def test_it_has_a_signature_of_its_own():
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    marked = with_open_masks(batch)
    assert opaque_type(marked) is None
    assert signature_of(marked) != signature_of(batch)
    assert hash(signature_of(marked)) == hash(signature_of(with_open_masks(dict(batch))))


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "attention_mask": PADDED},
        {"input_ids": IDS, "attention_mask": 2 * torch.ones_like(IDS)},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 3, 3)},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 3, requires_grad=True)},
        {"input_ids": IDS, "attention_mask": None},
        {"attention_mask": torch.ones(2, 3)},
        {"hint": torch.empty(2, 3, device="meta"), "attention_mask": torch.ones(2, 3)},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 3, device="meta")},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 3).to(torch.float8_e4m3fn)},
        {"input_ids": IDS},
        {},
        (IDS, torch.ones(2, 3)),
        IDS,
    ],
    ids=[
        "padded",
        "twos",
        "of scores",
        "learnt",
        "none",
        "alone",
        "elsewhere",
        "meta",
        "float8",
        "without",
        "empty",
        "by position",
        "a tensor",
    ],
)
def test_anything_else_stays(batch):
    assert with_open_masks(batch) is batch
    if isinstance(batch, dict):
        assert with_tensors(batch) is batch
