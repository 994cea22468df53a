"""State: everything that a recorded step changes and that outlives it, kept so that the step may be tried out."""

import torch

from kitsune.device import rng_state, set_rng_state
from kitsune.engine.recording import Recording


class State:
    """Copies of the storages that were there before the step and that it writes, and the state of the generators."""

    def __init__(self, recording: Recording) -> None:
        self._device = recording.device
        self.numbers = sorted(recording.graph.written() & recording.held.keys())
        self._storages = [recording.held[number] for number in self.numbers]
        self._copies = [as_bytes(storage).clone() for storage in self._storages]
        self._random = rng_state(recording.device)

    def restore(self) -> None:
        for storage, copy in zip(self._storages, self._copies, strict=True):
            as_bytes(storage).copy_(copy)
        set_rng_state(self._device, self._random)

    def values(self) -> list[torch.Tensor]:
        """The copies, as bytes."""
        return self._copies


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """By bits, so that NaN equals NaN."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8))


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of bytes, on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
