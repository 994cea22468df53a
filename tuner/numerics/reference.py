"""The step as given in a wider dtype than its own: what the numbers of a candidate are compared with."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kitsune.errors import SURPRISES
from kitsune.workload import Workload
from tuner.workloads.batches import converted
from tuner.workloads.plain_step import plain_step

HALVES = frozenset({torch.bfloat16, torch.float16})
#: The note of a reference as given, of a model in fp32 and of one in half precision.
AS_GIVEN = ("the reference is fp32", "the reference is in half precision, as given")
#: What a model with a hard-coded dtype may raise in another one.
NOT_CONVERTIBLE = SURPRISES

PlainStep = Callable[[Any, Any, bool], torch.Tensor]


def dtypes_of_references(parameters: Iterable[torch.Tensor], *, double: bool) -> list[tuple[torch.dtype | None, str]]:
    """The dtypes that a reference may run in, the best one first, each with a note. None: as given, which always runs.

    A model given in half precision has a reference in fp32, since it would have no error against itself.
    """
    is_half = any(parameter.dtype in HALVES for parameter in parameters)
    return [
        *([(torch.float64, "")] if double else []),
        *([(torch.float32, "the reference is fp32, the model is not")] if is_half else []),
        (None, AS_GIVEN[is_half]),
    ]


def reference_step(workload: Workload, dtype: torch.dtype | None) -> PlainStep:
    """Its plain step of a batch and whether it updates, with the model, the loss and the batch's floats in `dtype`."""
    if dtype is None:
        return lambda x, y, update: plain_step(workload, x, y, update=update)
    for module in (workload.model, workload.loss_fn):
        if isinstance(module, torch.nn.Module):  # Module.to would make complex numbers real
            module.double() if dtype is torch.float64 else module.float()
    return lambda x, y, update: plain_step(workload, *converted((x, y), dtype), update=update)
