"""Storages: finds out which memory of a recorded step existed before it, is the step's own, or outlives it.

It holds storages, not tensors: a parameter cannot steal a gradient that is referenced elsewhere, and each would be
copied (270-520 us a step of BERT-base on an H200). A storage is identified by its StorageImpl, because autograd returns
saved tensors as other TensorImpls.
"""

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kitsune.device.backend import user_line
from kitsune.device.gc_control import live_tensors
from kitsune.device.static_batch import packing_of
from kitsune.errors import CaptureError, ErraticError
from kitsune.launches.model.launch_graph import Launch, Storage, is_filled
from kitsune.launches.model.recording import TensorView

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class Storages:
    """The storages that a step touches, numbered in the order in which they were first seen."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []  # in bytes, when first seen
        self._made: dict[int, str] = {}  # storage -> the launch or the allocation that made it, and where
        self._constant: set[int] = set()
        self._written: set[int] = set()
        self._available: set[int] = set()  # made, or to be allocated before a launch that was seen
        self._read_first: dict[int, str] = {}  # storages that are read before they are written -> launch, and where
        self._named_first: set[int] = set()  # storages that are first named by a launch that reads none of their bytes
        self._filled_first: set[int] = set()  # those of _read_first that the same launch also writes

    def place(self, tensor: torch.Tensor) -> TensorView:
        check_plain(tensor)
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._alive))
        if number == len(self._alive):
            self._alive.append(storage)
            self._sizes.append(storage.nbytes())
        return TensorView(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def allocated(self, places: Iterable[TensorView | None], by: str) -> None:
        where = at_line()
        for number in {place.storage for place in places if place is not None}:
            self._made.setdefault(number, f"{by}{where}")

    def lifted(self, places: Iterable[TensorView | None]) -> None:
        self._constant |= {place.storage for place in places if place is not None}

    def made(self, places: Collection[TensorView], by: str) -> None:
        """Notes what the current launch returns in new memory."""
        self.allocated(places, by)
        numbers = {place.storage for place in places}
        self._written |= numbers
        self._available |= numbers

    def made_at(self, addresses: Collection[int]) -> None:
        """Marks storages at these addresses as the step's own: Inductor allocates without the dispatcher."""
        for number, storage in enumerate(self._alive):
            if storage.data_ptr() in addresses:
                self._made.setdefault(number, "compiled code")

    def check_sizes(self, places: Iterable[TensorView], by: str) -> None:
        """Raises CaptureError when a storage was resized since it was first seen: its recorded spans are wrong then."""
        for number in {place.storage for place in places}:
            if self._alive[number].nbytes() != self._sizes[number]:
                raise CaptureError(f"{by} changes the size of a tensor that it writes{at_line()}")

    def touched(self, launch: Launch) -> tuple[int, ...]:
        """Notes what the launch touches. Returns the storages that must be allocated before it."""
        fresh = {span.storage for span in launch.writes} - self._written
        for span in filter(is_filled, launch.reads):
            if span.storage not in self._written and span.storage not in self._read_first:
                self._read_first[span.storage] = f"{launch.name}{at_line()}"
                self._filled_first |= {span.storage} & fresh
        unread = {span.storage for span in launch.reads if not is_filled(span)} - self._written
        self._named_first |= unread
        self._written |= fresh
        needed = (fresh | unread) - self._available
        self._available |= needed
        return tuple(sorted(needed))

    def settle(
        self, kept: set[int], device: torch.device, returned: Sequence[torch.Tensor]
    ) -> tuple[dict[int, torch.UntypedStorage], list[Storage]]:
        """(storages from before the step, all storages for the launch graph). Call it once, after the step.

        The step's own storages are those that it was seen to make, those that nothing else holds once the recording has
        released them, and those that it returns. A launch may read memory that nothing has written if it writes it too
        (Inductor's in_out_ptr of a reduction, an argument of a kernel of the user's).

        Raises CaptureError when memory is read that nothing recorded has written, or when Python holds a tensor that
        the step made and that is not among those it `returned`.
        """
        if self._constant & self._written:
            raise CaptureError("the step makes a constant and writes into it: a replay would not reset it")
        devices = [storage.device for storage in self._alive]
        self._constant |= {number for number in self._read_first if devices[number] != device}
        survivors = self._release_all(kept)
        held = {number: storage for number, storage in survivors.items() if self._was_there(number, kept)}
        for number, name in self._read_first.items():
            if number not in held and not (number in self._made and number in self._filled_first):
                raise self._freed_error(number, name)
        if kept - held.keys() - self._written:
            raise CaptureError("the step returns memory that no recorded launch has written")
        check_disjoint(held.values())
        own = {n: storage for n, storage in survivors.items() if n in self._made and devices[n] == device}
        self._check_not_kept(own, returned)
        storages = [Storage(size, number not in held, number in survivors) for number, size in enumerate(self._sizes)]
        return held, storages

    def _was_there(self, number: int, kept: set[int]) -> bool:
        was_used = number in self._read_first or number in self._named_first or number not in self._written
        return number not in self._made and (was_used or number not in kept)

    def _freed_error(self, number: int, reader: str) -> CaptureError:
        """The error for memory that is read, but that nothing recorded has written and nothing holds.

        ErraticError if the step did not make it: at the next replay it may be used for something else, also on one
        stream.
        """
        if number in self._made:
            return CaptureError(f"{reader} reads memory that no recorded launch has written")
        told = "a tensor that the step releases, and that existed before it or was made without being recorded"
        return ErraticError(f"{reader} reads {told}")

    def _check_not_kept(self, own: Mapping[int, torch.UntypedStorage], returned: Sequence[torch.Tensor]) -> None:
        """Raises CaptureError when Python still holds memory that the step has made.

        A plain graph writes that memory at every replay; planned launches write other memory, so it would become stale.
        """
        numbers = {storage._cdata: n for n, storage in own.items() if self._sizes[n] and n not in self._constant}
        for tensor in tensors_of_users(returned):
            number = numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                raise CaptureError(f"the step keeps a tensor that it made: what {self._made[number]} returned")

    def _release_all(self, kept: set[int]) -> dict[int, torch.UntypedStorage]:
        """Releases all storages but constants and those in `kept`. Returns these, and those that others hold."""
        keep = kept | self._constant
        survivors = {number: storage for number, storage in enumerate(self._alive) if number in keep}
        weak = {n: StorageWeakRef(storage) for n, storage in enumerate(self._alive) if n not in keep}
        self._alive.clear()
        torch.clear_autocast_cache()  # it holds casts of parameters as long as the user's autocast is active
        gc.collect()
        for number, reference in weak.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                survivors[number] = storage
        return survivors


def tensors_of_users(returned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All live Python tensors, except those that a step `returned`, gradients of parameters, and the bases of both.

    The gradient of a leaf that is not a parameter is excepted only if it was returned. Tensors that only C++ holds (a
    cache, a node of an autograd graph) are included if Python has ever seen them.
    """
    alive = [each for each in live_tensors() if type(each) in PLAIN and torch._C._has_storage(each)]
    leaves = [each for each in alive if each.is_leaf and isinstance(each, torch.nn.Parameter)]
    known = [*returned, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    known += [tensor._base for tensor in known if tensor._base is not None]
    ours = set(map(id, known))
    return [each for each in alive if id(each) not in ours]


def check_plain(tensor: torch.Tensor) -> None:
    """Raises CaptureError for a tensor that is not plain strided memory."""
    if reason := why_not_plain(tensor):
        raise CaptureError(f"{reason} cannot be followed{at_line()}")


def why_not_plain(tensor: torch.Tensor) -> str | None:
    """What such a tensor is, in words; None if it is plain."""
    if packing := packing_of(tensor):
        return f"a {packing} tensor"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if type(tensor) not in PLAIN:
        return f"a {type(tensor).__name__}, a subclass of torch.Tensor,"
    if tensor.is_conj():
        return "a conjugated view (resolve_conj() makes a plain tensor of it)"
    if tensor.is_neg():
        return "a view with its negative bit set (resolve_neg() makes a plain tensor of it)"
    return None


def check_disjoint(storages: Iterable[torch.UntypedStorage]) -> None:
    """Raises CaptureError when storages overlap: hazards are found by storage."""
    ranges = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
    for (_, end), (begin, _) in pairwise(ranges):
        if begin < end:
            raise CaptureError("two storages of the step share memory")


def at_line() -> str:
    line = user_line()
    return f" ({line[0]}:{line[1]})" if line else ""
