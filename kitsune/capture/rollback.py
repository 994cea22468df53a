"""Snapshot: what a failed forward has touched and a second try must find as it was: generators and buffers."""

import torch

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.update.optimizer_update import parameters_of


class Snapshot:
    """The state of the generators and copies of a model's buffers."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._random = rng_state(device)
        self._buffers = [buffer.clone() for buffer in model.buffers()]

    def restore(self) -> None:
        set_rng_state(self._device, self._random)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)


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
