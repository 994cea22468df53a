"""State: a snapshot of everything that a recorded step changes, so that the step can be tried and rolled back."""

import torch

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.errors import CaptureError
from kitsune.launches.model.recording import Recording


class State:
    """Copies of the storages from before the step that it writes, and the state of the generators.

    A context manager: restores them on exit.
    """

    def __init__(self, recording: Recording) -> None:
        self._device = recording.device
        self.numbers = sorted(recording.graph.written() & recording.held.keys())
        self._storages = [recording.held[number] for number in self.numbers]
        self._copies = [as_bytes(storage).clone() for storage in self._storages]
        self._random = rng_state(recording.device)
        self._generators = [(generator, generator.get_state()) for generator in recording.generators]

    def __enter__(self) -> "State":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restores the snapshot. Raises CaptureError, after restoring the rest, when a storage has another size."""
        pairs = list(zip(self._storages, self._copies, strict=True))
        kept = [(storage, copy) for storage, copy in pairs if storage.nbytes() == copy.numel()]
        for storage, copy in kept:
            as_bytes(storage).copy_(copy)
        set_rng_state(self._device, self._random)
        for generator, state in self._generators:
            generator.set_state(state)
        if len(kept) < len(pairs):
            raise CaptureError("the step changes the size of a storage from before the step (`resize_`)")

    def values(self) -> list[torch.Tensor]:
        """The copies, as bytes."""
        return self._copies


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether the bits are equal, so that NaN equals NaN."""
    return torch.equal(bytes_of(one), bytes_of(two))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of the tensor in their order, as a flat tensor of bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of bytes that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
