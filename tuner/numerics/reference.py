"""The step as given in a wider dtype than its own: what the numbers of a candidate are compared with."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kitsune.workload import Workload
from tuner.workloads.batches import converted
from tuner.workloads.plain_step import plain_step

HALVES = frozenset({torch.bfloat16, torch.float16})
#: What a model with a hard-coded dtype may raise in another one.
NOT_CONVERTIBLE = (RuntimeError, TypeError, ValueError, NotImplementedError)

PlainStep = Callable[[Any, Any, bool], torch.Tensor]


def dtypes_of_references(parameters: Iterable[torch.Tensor], *, double: bool) -> list[tuple[torch.dtype | None, str]]:
    """The dtypes that a reference may run in, the best one first, each with a note. None: as given, which always runs.

    A model given in half precision has a reference in fp32, since it would have no error against itself.
    """
    is_half = any(parameter.dtype in HALVES for parameter in parameters)
    as_given = "the reference is in half precision, as given" if is_half else "the reference is fp32"
    return [
        *([(torch.float64, "")] if double else []),
        *([(torch.float32, "the reference is fp32")] if is_half else []),
        (None, as_given),
    ]


def reference_step(workload: Workload, dtype: torch.dtype | None) -> PlainStep:
    """Its plain step of a batch and whether it updates, with the model, the loss and the batch's floats in `dtype`."""
    if dtype is None:
        return lambda x, y, update: plain_step(workload, x, y, update=update)
    workload.model.to(dtype)
    if isinstance(workload.loss_fn, torch.nn.Module):
        workload.loss_fn.to(dtype)
    return lambda x, y, update: plain_step(workload, *converted((x, y), dtype), update=update)
