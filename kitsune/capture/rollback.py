"""What a failed run has changed, put back before the run is repeated."""

import torch

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.update.optimizer_update import parameters_of


class Rollback:
    """The state of the generators, copies of a model's buffers, and whether an optimizer has updated anything since.

    Parameters are not copied. With `optimizer`, `is_spoilt` tells whether they were updated; without, they must not be.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model = model
        self._device = device
        self._random = rng_state(device)
        self._buffers = [buffer.clone() for buffer in model.buffers()]
        self._updated = [] if optimizer is None else parameters_of(optimizer)
        self._sums = sums(self._updated)

    def is_spoilt(self) -> bool:
        """Whether parameters were updated, so that the run cannot be repeated. Waits for the device."""
        return not all(map(torch.equal, self._sums, sums(self._updated)))

    def restore(self) -> None:
        set_rng_state(self._device, self._random)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)


def sums(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Fused updates leave the version of a parameter as it was. In float64: a sum in bf16 may hide small changes."""
    detached = [parameter.detach() for parameter in parameters]
    return [each.sum(dtype=torch.float64 if each.is_floating_point() else None) for each in detached]
