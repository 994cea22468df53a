"""Derives other batches from the example batch: same shapes, dtypes and value ranges, reproducible by a seed."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.workload import batch_tensors


def varied(batch: Any, seed: int) -> Any:
    """Another batch made of the same rows. Every tensor is changed on its own, so rows of x get other rows of y.

    Floats: each row becomes a convex combination with another row, which keeps ranges, masks of minus infinity and
    probabilities valid. Integers and booleans: rows are permuted, so that indices stay in range. A tensor whose first
    dimension is not the batch dimension (an edge list, a table) is not changed. In a batch of one row, integers are
    rotated along their last dimension and floats are moved towards their mean.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [tensor for tensor in batch_tensors(batch) if tensor.dim() > 0]
    rows = tensors[0].shape[0] if tensors else 0
    return pytree.tree_map(lambda leaf: _other(leaf, rows, generator), batch)


def _other(leaf: Any, rows: int, generator: torch.Generator) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows or rows == 0:
        return leaf
    with torch.no_grad():
        values = _one_row(leaf, generator) if rows == 1 else _rows_mixed(leaf, rows, generator)
        # empty_like keeps the strides: a tuned step may treat another memory layout as another kind of batch
        return torch.empty_like(leaf).copy_(values).requires_grad_(leaf.requires_grad)


def _rows_mixed(leaf: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    others = leaf[torch.randperm(rows, generator=generator).to(leaf.device)]
    if not _is_real(leaf):
        return others
    share = 0.25 + 0.5 * float(torch.rand((), generator=generator))
    return share * leaf + (1 - share) * others


def _one_row(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not _is_real(leaf):
        shift = int(torch.randint(max(1, leaf.shape[-1]), (), generator=generator))
        return leaf.roll(shift, dims=-1)
    mean = leaf.mean()
    if not torch.isfinite(mean):
        return leaf
    share = 0.25 + 0.5 * float(torch.rand((), generator=generator))
    return share * leaf + (1 - share) * mean


def _is_real(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def converted(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floats in `dtype`."""
    return pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, batch
    )
