"""Splits a batch into micro-batches of equal size, each with its share of the rows, for gradient accumulation."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.device.static_batch import tensors_of
from kitsune.errors import WorkloadError

Batch = tuple[Any, Any]


def micro_batches(batch: Batch, count: int) -> Iterator[tuple[Batch, float]]:
    """`count` parts; where the rows do not divide evenly, the first parts have one more. Fewer for fewer rows.

    Rows are the first dimension of the first tensor; what has another first dimension goes with every part. Raises
    WorkloadError for a batch without rows.
    """
    if count == 1:
        yield batch, 1.0
        return
    rows = rows_of(batch)
    least, more = divmod(rows, count)
    for begin, end in pairwise(least * number + min(number, more) for number in range(count + 1)):
        if begin < end:
            yield pytree.tree_map(lambda leaf, at=slice(begin, end): part(leaf, rows, at), batch), (end - begin) / rows


def rows_of(batch: Batch) -> int:
    """Raises WorkloadError when there are none."""
    rows = next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 0)
    if not rows:
        raise WorkloadError("accumulation_steps splits a batch by its rows, and this one has none in sight")
    return rows


def part(leaf: Any, rows: int, at: slice) -> Any:
    return leaf[at] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else leaf
