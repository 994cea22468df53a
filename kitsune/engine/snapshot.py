"""Snapshot: what a failed forward has touched and a second try must find as it was: generators and buffers."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from kitsune.device import rng_state, set_rng_state
from kitsune.engine.update import parameters_of

#: Of a module, where its parameters, buffers and modules are; what it is besides are its attributes.
TABLES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The state of the generators and copies of a model's buffers, and of what else its forward was seen to write."""

    def __init__(self, model: torch.nn.Module, device: torch.device, also: Sequence[torch.Tensor] = ()) -> None:
        self._model = model
        self._device = device
        self._random = rng_state(device)
        self._buffers = [buffer.clone() for buffer in model.buffers()]
        self._also = [(tensor, tensor.detach().clone()) for tensor in also]

    def restore(self) -> None:
        set_rng_state(self._device, self._random)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)
            for tensor, value in self._also:
                tensor.copy_(value)


class Sums:
    """By which one sees that an optimizer has updated something: fused updates leave a parameter's version as it was.

    Launches only; `changed` waits for the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._sums = self._look()

    def changed(self) -> bool:
        return not all(map(torch.equal, self._sums, self._look()))

    def _look(self) -> list[torch.Tensor]:
        parameters = [parameter.detach() for parameter in parameters_of(self._optimizer)]
        # In bf16 the sum of many may stay where each of them moves.
        return [each.sum(dtype=torch.float64 if each.is_floating_point() else None) for each in parameters]


class Versions:
    """Which of a model's tensors that are no buffers are written from here on: parameters, and attributes of modules.

    They may be all that a large model has, so one looks first, and copies what is written only.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        attributes = [value for module in model.modules() for name, value in vars(module).items() if name not in TABLES]
        leaves = chain(model.parameters(), *map(items_of, attributes))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()}
        self._seen = [(tensor, tensor._version) for tensor in tensors.values()]

    def written(self) -> list[torch.Tensor]:
        return [tensor for tensor, version in self._seen if tensor._version != version]


def items_of(value: Any) -> Iterable[Any]:
    """What a list or a dict holds; of anything else itself."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else (value,)
