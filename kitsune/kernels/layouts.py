"""Memory layouts of tensors, and copies with the layout of another tensor."""

from collections.abc import Sequence
from typing import Final

import torch

#: The most elements of padding behind a row: rows in half precision then begin at multiples of 128 bytes.
MOST_PADDING: Final = 63
#: Of a tensor, as formulas of operations get it.
Shape = tuple[int, ...]


def is_last(x: torch.Tensor) -> bool:
    """Whether channels are contiguous: channels_last in any number of dimensions, or channels of one element."""
    return x.movedim(1, -1).is_contiguous() and (not x.is_contiguous() or x.shape[0] * x.shape[1] == x.numel())


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether it has four dimensions, is laid out as torch.channels_last, and is not contiguous as well."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def is_dense(x: torch.Tensor) -> bool:
    """Whether its memory has no gaps and no overlaps, in any order of dimensions."""
    return x.is_contiguous() or has_no_gaps(x.shape, x.stride())


def has_no_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """`is_dense` for a shape and strides."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is channels_last, else a contiguous one."""
    return x if is_last(x) else x.contiguous()


def in_layout_of(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other` with the memory layout of a dense `x`."""
    return other if has_layout_of(x, other) else torch.empty_like(x, dtype=other.dtype).copy_(other)


def has_layout_of(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same shape have the same layout."""
    steps = zip(x.shape, x.stride(), other.stride(), strict=True)
    return x.stride() == other.stride() or all(size == 1 or one == two for size, one, two in steps)
