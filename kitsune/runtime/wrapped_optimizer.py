"""The optimizer that a KitsuneOptimizer wraps: built if need be, and copied as a checkpoint shows it."""

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from kitsune.errors import SettingsError
from kitsune.update.optimizer_update import parameters_of


def inner_of(
    optimizer: Optimizer | type[Optimizer], params: Iterable[Any] | None, arguments: dict[str, Any]
) -> Optimizer:
    """The optimizer itself, or one of the class with its own arguments. Raises SettingsError."""
    if isinstance(optimizer, Optimizer):
        if params is not None or arguments:
            extra = ", ".join(arguments) or "params"
            raise SettingsError(f"{extra}: the optimizer is built already; pass a class to have it built")
        return optimizer
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise SettingsError(f"{optimizer!r} is neither an optimizer nor a class of torch.optim")
    if params is None:
        raise SettingsError(f"{optimizer.__name__} needs the model's parameters: pass model.parameters()")
    try:
        return optimizer(params, **arguments)
    except TypeError as error:
        raise SettingsError(f"{optimizer.__name__} does not take these arguments: {error}") from error


def as_given(optimizer: Optimizer) -> Optimizer:
    """A copy that shares the parameters, with the flags and the state that a checkpoint shows."""
    checkpoint = optimizer.state_dict()
    given = copy.copy(optimizer)
    groups = zip(optimizer.param_groups, checkpoint["param_groups"], strict=True)
    given.param_groups = [{**saved, "params": group["params"]} for group, saved in groups]
    parameters = dict(enumerate(parameters_of(optimizer)))
    given.state = defaultdict(dict, {parameters.get(key, key): value for key, value in checkpoint["state"].items()})
    return given
