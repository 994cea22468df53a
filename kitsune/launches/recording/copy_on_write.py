"""Undo: rolls back what runs of the user's code write, by copies on the first write."""

import gc
from collections.abc import Iterable
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from kitsune.device.backend import rng_state, set_rng_state
from kitsune.device.gc_control import are_tracked, live_tensors
from kitsune.device.tensor_bytes import as_bytes

HIDDEN: Final = "gc.freeze() hides tensors that planning has to restore; call it before the model is made"


class Undo:
    """Copies storages that existed when it was made on their first write, and restores them.

    On the first write only, because there may be no memory for a copy of the model. It knows the storages of tensors
    that live in Python. It does not see writes of compiled code on a CPU, writes into sparse tensors, and writes that
    the schema of an operation does not declare.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = rng_state(device)
        alive = storages_of(live_tensors())
        # Weak references, because a recording checks whether anything else still holds what the step releases.
        self._there = {storage._cdata: StorageWeakRef(storage) for storage in alive}
        self._copies: list[tuple[StorageWeakRef, torch.Tensor]] = []
        self._generators: dict[torch.Generator, torch.Tensor] = {}

    def about_to_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Call it before every write, on the stream of the write."""
        with _disable_current_modes():
            for storage in storages_of(tensors):
                reference = self._there.pop(storage._cdata, None)
                if reference is not None:
                    self._copies.append((reference, as_bytes(storage).clone()))

    def about_to_draw(self, generators: Iterable[torch.Generator]) -> None:
        """Call it before numbers are drawn from generators of the user's own."""
        for generator in generators:
            if generator not in self._generators:
                self._generators[generator] = generator.get_state()

    def restore(self) -> None:
        """Restores storages and generators. Call it on the stream of the writes, after all of them were issued."""
        for reference, copy in self._copies:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                continue
            if storage.nbytes() < copy.numel():
                storage.resize_(copy.numel())
            # A storage that has grown keeps its size, because its tensors have the new size.
            as_bytes(storage)[: copy.numel()].copy_(copy)
        set_rng_state(self._device, self._random)
        for generator, state in self._generators.items():
            generator.set_state(state)


def are_hidden(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether `gc.freeze()` was called after these tensors were made, so that live tensors cannot be listed.

    Counting frozen objects takes 46 ms if all of torch is frozen, so it is done last.
    """
    return not are_tracked(tensors) and gc.get_freeze_count() > 0


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors that have one; a sparse tensor has several tensors instead."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.untyped_storage() for tensor in tensors if torch._C._has_storage(tensor)]
