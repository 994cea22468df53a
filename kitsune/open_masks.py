"""Attention masks of a batch that show every position: constants of a compiled step, where tensors would be inputs."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

#: The argument of a model, as models of Hugging Face name it: 1 for each position that others may attend to.
ARGUMENT: Final = "attention_mask"
DTYPES: Final = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    }
)


class OpenMask(NamedTuple):
    """Stands in a batch for a mask full of ones, in the shape of another tensor of the batch, beside it."""

    like: str
    dtype: torch.dtype


def with_open_masks(given: Any) -> Any:
    """The arguments of a model by name, with an OpenMask in place of a mask that shows every position.

    The tensor like it goes before it: what splits a batch looks at its first tensor. Anything else is returned as it
    is. For a mask on a GPU the host waits until its values are known.
    """
    mask = given.get(ARGUMENT) if isinstance(given, dict) else None
    if type(mask) is not torch.Tensor or not is_readable(mask):
        return given
    like = next((name for name, other in given.items() if name != ARGUMENT and is_like(other, mask)), None)
    if like is None or not torch.all(mask == 1):
        return given
    pair = {like: given[like], ARGUMENT: OpenMask(like, mask.dtype)}
    return {name: one for at in given for name, one in (pair if at in pair else {at: given[at]}).items()}


def with_tensors(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with a tensor in place of an OpenMask. In a compiled function it is a constant of the graph."""
    mask = given.get(ARGUMENT)
    if not isinstance(mask, OpenMask):
        return given
    like = given[mask.like]
    return {**given, ARGUMENT: torch.ones(like.shape, dtype=mask.dtype, device=like.device)}


def is_readable(mask: torch.Tensor) -> bool:
    is_plain = mask.layout is torch.strided and not mask.is_nested and not mask.is_meta and not mask.requires_grad
    return is_plain and mask.dtype in DTYPES


def is_like(value: Any, mask: torch.Tensor) -> bool:
    is_plain = type(value) is torch.Tensor and not value.is_nested
    return is_plain and (value.shape, value.device) == (mask.shape, mask.device)
