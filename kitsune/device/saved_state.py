"""SavedState: copies of tensors and the states of generators, to roll back a run."""

from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.errors import CaptureError


class SavedState:
    """Restores tensors and generators to what they were when it was made.

    A context manager: restores on exit. `tensors` is called again by `restore`, because a run may have put another
    tensor in the place of one. `device`: its default generators are saved too. `copies`: one of each tensor.
    A tensor that has another number of elements now is left as it is; then `restore` raises CaptureError with the
    reason `resized`, if there is one.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[torch.Tensor]],
        device: torch.device | None = None,
        generators: Iterable[torch.Generator] = (),
        resized: str = "",
    ) -> None:
        self._tensors = tensors
        self._resized = resized
        self._random = None if device is None else (device, rng_state(device))
        self._generators = [(generator, generator.get_state()) for generator in generators]
        with torch.no_grad():
            self.copies = [tensor.clone() for tensor in tensors()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        pairs = list(zip(self._tensors(), self.copies, strict=True))
        kept = [(tensor, copy) for tensor, copy in pairs if tensor.numel() == copy.numel()]
        with torch.no_grad():
            for tensor, copy in kept:
                tensor.copy_(copy.reshape(tensor.shape))
        if self._random is not None:
            set_rng_state(*self._random)
        for generator, state in self._generators:
            generator.set_state(state)
        if self._resized and len(kept) < len(pairs):
            raise CaptureError(self._resized)

    def has_changed(self) -> bool:
        """Whether a tensor differs from its copy. Waits for the device."""
        return not all(map(torch.equal, self._tensors(), self.copies))
