"""Storages: the memory of a step while it is recorded: what was there before, what is the step's own, what stays.

Storages are held, not tensors: a gradient that somebody else holds cannot be stolen by its parameter, and each would be
copied (270-520 us a step of BERT-base on an H200). A storage is told by its StorageImpl, since autograd gives saved
tensors back as other TensorImpls.
"""

import gc
from collections.abc import Collection, Iterable
from itertools import pairwise

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kitsune.device import user_line
from kitsune.engine.graph import Launch, Storage
from kitsune.engine.recording import Place
from kitsune.errors import CaptureError


class Storages:
    """The storages that a step touches, by the order in which they were seen first."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._made: set[int] = set()  # by a launch, or by an allocation that we saw
        self._constant: set[int] = set()
        self._written: set[int] = set()
        self._read_first: dict[int, str] = {}  # storage -> launch
        self._filled_first: set[int] = set()  # of those, what the same launch writes

    def place(self, tensor: torch.Tensor) -> Place:
        check_plain(tensor)
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._alive))
        if number == len(self._alive):
            self._alive.append(storage)
        return Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def allocated(self, places: Iterable[Place | None]) -> None:
        self._made |= {place.storage for place in places if place is not None}

    def lifted(self, places: Iterable[Place | None]) -> None:
        self._constant |= {place.storage for place in places if place is not None}

    def made(self, places: Iterable[Place]) -> None:
        """By the launch that is being noted, as what it returns."""
        numbers = {place.storage for place in places}
        self._made |= numbers
        self._written |= numbers

    def made_at(self, addresses: Collection[int]) -> None:
        """Inductor allocates without the dispatcher: an address tells that such a storage is the step's."""
        self._made |= {number for number, storage in enumerate(self._alive) if storage.data_ptr() in addresses}

    def touched(self, launch: Launch) -> tuple[int, ...]:
        """The storages that nobody has written before, and that have to be there for this launch to write."""
        fresh = {span.storage for span in launch.writes} - self._written
        for span in launch.reads:
            if span.storage not in self._written and span.storage not in self._read_first:
                self._read_first[span.storage] = launch.name
                self._filled_first |= {span.storage} & fresh
        self._written |= fresh
        return tuple(sorted(fresh))

    def settle(self, kept: set[int], device: torch.device) -> tuple[dict[int, torch.UntypedStorage], list[Storage]]:
        """(storages that were there before the step, all of them as the graph knows them).

        The step's own are those that were seen to be made in it, those that nobody holds once we let them go, and
        those that it returns. A launch may be given memory of nobody's to read if it writes it too: it writes it first
        (Inductor's in_out_ptr of a reduction, an argument of a kernel of the user's).
        """
        devices = [storage.device for storage in self._alive]
        sizes = [storage.nbytes() for storage in self._alive]
        self._constant |= {number for number in self._read_first if devices[number] != device}
        survivors = self._let_go(kept)
        held = {number: storage for number, storage in survivors.items() if self._was_there(number, kept)}
        for number, name in self._read_first.items():
            if number not in held and not (number in self._made and number in self._filled_first):
                raise CaptureError(f"{name} reads memory that nothing in our sight has written")
        check_disjoint(held.values())
        storages = [Storage(size, number not in held, number in survivors) for number, size in enumerate(sizes)]
        return held, storages

    def _was_there(self, number: int, kept: set[int]) -> bool:
        return number not in self._made and (number in self._read_first or number not in kept)

    def _let_go(self, kept: set[int]) -> dict[int, torch.UntypedStorage]:
        """The storages that live on without us, and those that we keep alive ourselves."""
        keep = kept | self._constant
        survivors = {number: storage for number, storage in enumerate(self._alive) if number in keep}
        weak = {n: StorageWeakRef(storage) for n, storage in enumerate(self._alive) if n not in keep}
        self._alive.clear()
        gc.collect()
        for number, reference in weak.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                survivors[number] = storage
        return survivors


def check_plain(tensor: torch.Tensor) -> None:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if tensor.is_nested or tensor.is_quantized:
        raise CaptureError(f"a {'nested' if tensor.is_nested else 'quantized'} tensor cannot be followed{at_line()}")
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        raise CaptureError(f"a {type(tensor).__name__} of {tensor.layout} cannot be followed{at_line()}")


def check_disjoint(storages: Iterable[torch.UntypedStorage]) -> None:
    """Hazards are found by storage, so memory must belong to one of them only."""
    ranges = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
    for (_, end), (begin, _) in pairwise(ranges):
        if begin < end:
            raise CaptureError("two storages of the step share memory")


def at_line() -> str:
    line = user_line()
    return f" ({line[0]}:{line[1]})" if line else ""
