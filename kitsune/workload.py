"""Workload: a model, its loss, its optimizer and an example batch; and how the loss of a batch is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.errors import WorkloadError

LossFn = Callable[[Any, Any], torch.Tensor] | None
Batch = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step, as the user has it.

    `batch = (x, y)` and the loss is `loss_fn(model(x), y)`; `x` is a tensor, a tuple (positional arguments) or a dict
    (keyword arguments). `loss_fn=None` when the model returns its loss itself: a tensor, or an object with `.loss`.
    """

    model: torch.nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    batch: Batch

    def __post_init__(self) -> None:
        check_types(self.model, self.optimizer)
        if not isinstance(self.batch, tuple) or len(self.batch) != 2:
            raise WorkloadError("batch must be a pair (x, y); y may be None when the model returns its loss itself")
        if not batch_tensors(self.batch):
            raise WorkloadError("batch holds no tensor")


def check_types(model: Any, optimizer: Any) -> None:
    """Raises WorkloadError when these are not a model and an optimizer of torch."""
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer is needed")


def call_model(model: Callable[..., Any], x: Any) -> Any:
    """model(x), model(*x) or model(**x), by the type of x."""
    if isinstance(x, dict):
        return model(**x)
    if isinstance(x, tuple):
        return model(*x)
    return model(x)


def loss_of(output: Any, loss_fn: LossFn, y: Any) -> torch.Tensor:
    """The scalar loss of a model's output. Raises WorkloadError when there is none."""
    loss = loss_fn(output, y) if loss_fn is not None else own_loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise WorkloadError("the loss is not a tensor of one element; pass a loss_fn that returns a scalar")
    return loss.reshape(())


def own_loss(output: Any) -> Any:
    """The loss that a model returned itself: the output, its `.loss`, or its "loss" item."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", None)


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def move_batch(batch: Any, device: torch.device | str) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
