"""An example batch in, other batches of the same shapes, dtypes and ranges out, the same ones for the same seed."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.workload import batch_tensors


def varied(batch: Any, seed: int) -> Any:
    """Another batch made of the same rows. Every tensor is changed by itself, so x and y are paired anew.

    Floats: each row mixed with another one (a convex combination), so that ranges, masks of minus infinity, one-hot
    rows and probabilities stay what they are. Integers and booleans: rows permuted, so that indices stay in range.
    A tensor whose first dimension is not the batch's (an edge list, a table) is left alone; with a batch of one row,
    integers are rotated along their last dimension and floats pulled towards their mean.
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
        # empty_like keeps the strides: to a tuned step, another layout may be another batch
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


def doubled(batch: Any) -> Any:
    """The batch with its floats in float64."""
    return pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, batch
    )
