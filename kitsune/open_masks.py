"""Attention masks of a batch that show every position: constants of a compiled step, where tensors would be inputs."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

#: The argument of a model, as models of Hugging Face name it: 1 for each position that others may attend to.
ARGUMENT: Final = "attention_mask"


class OpenMask(NamedTuple):
    """Stands in a batch for a mask full of ones, in the shape of another tensor of the batch."""

    like: str
    dtype: torch.dtype


def with_open_masks(given: Any) -> Any:
    """The arguments of a model by name, with an OpenMask in place of a mask that shows every position.

    Anything else is returned as it is. For a mask on a GPU the host waits until its values are known.
    """
    mask = given.get(ARGUMENT) if isinstance(given, dict) else None
    if type(mask) is not torch.Tensor or mask.layout is not torch.strided or mask.is_nested or mask.requires_grad:
        return given
    like = next((name for name, other in given.items() if name != ARGUMENT and shape_of(other) == mask.shape), None)
    if like is None or not torch.all(mask == 1):
        return given
    return {**given, ARGUMENT: OpenMask(like, mask.dtype)}


def with_tensors(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with a tensor in place of an OpenMask. In a compiled function it is a constant of the graph."""
    mask = given.get(ARGUMENT)
    if not isinstance(mask, OpenMask):
        return given
    like = given[mask.like]
    return {**given, ARGUMENT: torch.ones(like.shape, dtype=mask.dtype, device=like.device)}


def shape_of(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) and not value.is_nested else None
