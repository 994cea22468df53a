"""How the elements of a tensor lie in memory, and copies that lie as another tensor does."""

from collections.abc import Sequence

import torch


def is_last(x: torch.Tensor) -> bool:
    """Whether channels lie side by side: channels_last in any number of dimensions, or channels of one element."""
    return x.movedim(1, -1).is_contiguous() and (not x.is_contiguous() or x.shape[0] * x.shape[1] == x.numel())


def is_dense(x: torch.Tensor) -> bool:
    """Whether its elements lie in memory without gaps and overlaps, in whatever order."""
    return x.is_contiguous() or has_no_gaps(x.shape, x.stride())


def has_no_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of this geometry lie so."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def dense(x: torch.Tensor) -> torch.Tensor:
    """The same as it is if it is contiguous or channels_last, else contiguous."""
    return x if is_last(x) else x.contiguous()


def laid_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other` in the order in memory of a dense `x`."""
    return other if lies_as(x, other) else torch.empty_like(x, dtype=other.dtype).copy_(other)


def lies_as(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements at the same places."""
    steps = zip(x.shape, x.stride(), other.stride(), strict=True)
    return x.stride() == other.stride() or all(size == 1 or one == two for size, one, two in steps)
