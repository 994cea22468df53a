"""Workload: model, loss, optimizer and example batch of a training step, and how the loss of a batch is computed."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.errors import WorkloadError
from kitsune.plan import shapes_text

LossFn = Callable[[Any, Any], torch.Tensor] | None
Batch = tuple[Any, Any]
#: An iterable of batches that can be iterated again (a list, a DataLoader), or a function of a seed that returns one.
Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step, as the user wrote it.

    `batch = (x, y)` and the loss is `loss_fn(model(x), y)`; `x` is a tensor, a tuple (positional arguments) or a
    mapping (keyword arguments), such as a dict or a BatchEncoding. `loss_fn=None` when the model returns its
    loss itself: a tensor, or an object with `.loss`.

    `batches`, which `kitsune verify` trains on: many pairs like `batch`, of the same shapes. An iterable that can be
    iterated again, or a function of a seed that returns one, the same for the same seed.

    Raises WorkloadError when an argument has the wrong type, or the batch holds no tensor.
    """

    model: torch.nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    batch: Batch
    batches: Batches | None = None

    def __post_init__(self) -> None:
        check_types(self.model, self.loss_fn, self.optimizer)
        if not isinstance(self.batch, tuple) or len(self.batch) != 2:
            raise WorkloadError("batch must be a pair (x, y); y may be None when the model returns its loss itself")
        x, y = self.batch
        object.__setattr__(self, "batch", (as_arguments(x), y))
        if not batch_tensors(self.batch):
            raise WorkloadError("batch holds no tensor")
        check_batches(self.batches)


def check_types(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Raises WorkloadError unless these are a torch model, a callable loss or None, and a torch optimizer."""
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    if loss_fn is not None and not callable(loss_fn):
        raise WorkloadError(f"loss_fn is {loss_fn!r:.100}; a function of the model's output and y is needed, or None")
    if type(optimizer).__module__ == "kitsune.optimizer":
        raise WorkloadError("a KitsuneOptimizer runs a loop of your own; give its base_optimizer here")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer is needed")


def check_batches(batches: Any) -> None:
    """Raises WorkloadError when the batches cannot be iterated more than once. Does not iterate them."""
    if batches is None or callable(batches):
        return
    if isinstance(batches, Iterator):
        raise WorkloadError("batches can be gone through only once; give a list, a DataLoader or a function of a seed")
    if not isinstance(batches, Iterable):
        raise WorkloadError(f"batches is a {type(batches).__name__}; give an iterable of pairs or a function of a seed")


def check_trains(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises WorkloadError when the optimizer does not fit the model, or no parameter is trainable."""
    check_optimizer(model, optimizer)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("every parameter of the model is frozen: leave requires_grad on for those to be trained")


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises WorkloadError when the optimizer does not update this model exactly once a step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise WorkloadError("LBFGS evaluates a closure several times a step: use it in a loop of your own")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise WorkloadError("the optimizer holds none of the model's parameters")


def device_of(model: torch.nn.Module) -> torch.device:
    """The one device of a model. Raises WorkloadError when it has no parameters or spans several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise WorkloadError(f"the model's parameters must be on one device; found {found}")
    return devices.pop()


def as_arguments(x: Any) -> Any:
    """A mapping that is no dict as a dict, in which tensors are found; anything else as it is."""
    return dict(x) if isinstance(x, Mapping) and not isinstance(x, dict) else x


def call_model(model: Callable[..., Any], x: Any) -> Any:
    """model(x), model(*x) or model(**x), by the type of x."""
    if isinstance(x, dict):
        return model(**x)
    if isinstance(x, tuple):
        return model(*x)
    return model(x)


def call_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The x for which `call_model(model, x)` is model(*args, **kwargs). Raises WorkloadError when there is none."""
    if not kwargs:
        return args
    signature = inspect.signature(model.forward)
    named: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise WorkloadError(f"the model takes {name!r} by position alone, and others by name; give all by position")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def loss_of(output: Any, loss_fn: LossFn, y: Any) -> torch.Tensor:
    """The scalar loss of a model's output. Raises WorkloadError when it is not a tensor of one element."""
    loss = loss_fn(output, y) if loss_fn is not None else own_loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise WorkloadError("the loss is not a tensor of one element; pass a loss_fn that returns a scalar")
    return loss.reshape(())


def own_loss(output: Any) -> Any:
    """The loss in a model's output: the output itself, its "loss" item or its `.loss`; None when there is none."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", None)


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def shapes_of(x: Any) -> str:
    """The shapes of the tensors in x, in the format of `Plan.batch`."""
    return shapes_text(tensor.shape for tensor in batch_tensors(x))


def move_batch(batch: Any, device: torch.device | str) -> Any:
    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return move_batch(as_arguments(leaf), device)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(moved, batch)
