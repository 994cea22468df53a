"""Undo: what runs of a user's code have written, put back, so that they may be made as if they had not been."""

import gc
from collections.abc import Iterable
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.device.gc_control import are_tracked, live_tensors
from kitsune.launches.model.step_state import as_bytes

HIDDEN: Final = "gc.freeze() hides what planning has to put back; call it before the model is made"


class Undo:
    """Copies the bytes of what was there when it was made, on the first write: a model may be all that memory holds.

    Of a tensor that was there Python knows. Not seen are the writes of a CPU's compiled code, those into sparse
    tensors, and those of an operation that its schema does not tell of.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = rng_state(device)
        alive = storages_of(live_tensors())
        # Weak: a recording asks whether anybody else still holds what the step lets go of.
        self._there = {storage._cdata: StorageWeakRef(storage) for storage in alive}
        self._copies: list[tuple[StorageWeakRef, torch.Tensor]] = []
        self._generators: dict[torch.Generator, torch.Tensor] = {}

    def about_to_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """To be called before every write, on the stream that it is issued to."""
        with _disable_current_modes():
            for storage in storages_of(tensors):
                reference = self._there.pop(storage._cdata, None)
                if reference is not None:
                    self._copies.append((reference, as_bytes(storage).clone()))

    def about_to_draw(self, generators: Iterable[torch.Generator]) -> None:
        """To be called before numbers are drawn from generators of the user's own."""
        for generator in generators:
            if generator not in self._generators:
                self._generators[generator] = generator.get_state()

    def restore(self) -> None:
        """On the stream of the writes, once they are all issued."""
        for reference, copy in self._copies:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                continue
            if storage.nbytes() < copy.numel():
                storage.resize_(copy.numel())
            # One that has grown stays so: its tensors know their new size.
            as_bytes(storage)[: copy.numel()].copy_(copy)
        set_rng_state(self._device, self._random)
        for generator, state in self._generators.items():
            generator.set_state(state)


def are_hidden(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether `gc.freeze()` came after these were made: then what was there cannot be told.

    To count what is frozen takes 46 ms where all of torch is, so it is asked last.
    """
    return not are_tracked(tensors) and gc.get_freeze_count() > 0


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Of those that have one; a sparse tensor has several tensors instead."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.untyped_storage() for tensor in tensors if torch._C._has_storage(tensor)]
