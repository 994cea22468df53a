"""Restores buffers and generators after a failed run, before the run is repeated."""

import torch

from kitsune.device.saved_state import SavedState
from kitsune.update.optimizer_update import parameters_of


class Rollback:
    """The saved buffers of a model and generators, and whether an optimizer has updated anything since.

    Parameters are not copied. With `optimizer`, `is_spoilt` tells whether they were updated; without, they must not be.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        buffers = dict(model.named_buffers())

        def as_they_are() -> list[torch.Tensor]:
            """A run may replace a buffer, and register others, which are left as they are."""
            now = dict(model.named_buffers())
            return [now.get(name, buffer) for name, buffer in buffers.items()]

        self.restore = SavedState(as_they_are, device).restore
        self._updated = [] if optimizer is None else parameters_of(optimizer)
        self._sums = sums(self._updated)

    def is_spoilt(self) -> bool:
        """Whether parameters were updated, so that the run cannot be repeated. Waits for the device."""
        return not all(map(torch.equal, self._sums, sums(self._updated)))


def sums(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Fused updates leave the version of a parameter as it was. In float64: a sum in bf16 may hide small changes."""
    detached = [parameter.detach() for parameter in parameters]
    return [each.sum(dtype=torch.float64 if each.is_floating_point() else None) for each in detached]
