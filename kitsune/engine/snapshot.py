"""Snapshot: what a failed forward has touched and a second try must find as it was: generators and buffers."""

import torch

from kitsune.device import rng_state, set_rng_state


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
