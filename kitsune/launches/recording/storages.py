"""Storages: the memory of a step while it is recorded: what was there before, what is the step's own, what stays.

Storages are held, not tensors: a gradient that somebody else holds cannot be stolen by its parameter, and each would be
copied (270-520 us a step of BERT-base on an H200). A storage is told by its StorageImpl, since autograd gives saved
tensors back as other TensorImpls.
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
from kitsune.launches.model.recording import Place

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class Storages:
    """The storages that a step touches, by the order in which they were seen first."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []  # in bytes, when they were seen first
        self._made: dict[int, str] = {}  # storage -> the launch or the allocation that made it, and where
        self._constant: set[int] = set()
        self._written: set[int] = set()
        self._there: set[int] = set()  # made, or to be allocated before a launch that we have seen
        self._read_first: dict[int, str] = {}  # storage -> launch, and where
        self._named_first: set[int] = set()  # by a launch that reads none of their bytes
        self._filled_first: set[int] = set()  # of those, what the same launch writes

    def place(self, tensor: torch.Tensor) -> Place:
        check_plain(tensor)
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._alive))
        if number == len(self._alive):
            self._alive.append(storage)
            self._sizes.append(storage.nbytes())
        return Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def allocated(self, places: Iterable[Place | None], by: str) -> None:
        where = at_line()
        for number in {place.storage for place in places if place is not None}:
            self._made.setdefault(number, f"{by}{where}")

    def lifted(self, places: Iterable[Place | None]) -> None:
        self._constant |= {place.storage for place in places if place is not None}

    def made(self, places: Collection[Place], by: str) -> None:
        """By the launch that is being noted, as what it returns."""
        self.allocated(places, by)
        numbers = {place.storage for place in places}
        self._written |= numbers
        self._there |= numbers

    def made_at(self, addresses: Collection[int]) -> None:
        """Inductor allocates without the dispatcher: an address tells that such a storage is the step's."""
        for number, storage in enumerate(self._alive):
            if storage.data_ptr() in addresses:
                self._made.setdefault(number, "compiled code")

    def check_sizes(self, places: Iterable[Place], by: str) -> None:
        """Raises CaptureError when a storage is not as large as when it was seen first: its bytes were told before."""
        for number in {place.storage for place in places}:
            if self._alive[number].nbytes() != self._sizes[number]:
                raise CaptureError(f"{by} changes the size of a tensor that it writes{at_line()}")

    def touched(self, launch: Launch) -> tuple[int, ...]:
        """The storages that nobody has made or named before, and that have to be there for this launch."""
        fresh = {span.storage for span in launch.writes} - self._written
        for span in filter(is_filled, launch.reads):
            if span.storage not in self._written and span.storage not in self._read_first:
                self._read_first[span.storage] = f"{launch.name}{at_line()}"
                self._filled_first |= {span.storage} & fresh
        unread = {span.storage for span in launch.reads if not is_filled(span)} - self._written
        self._named_first |= unread
        self._written |= fresh
        needed = (fresh | unread) - self._there
        self._there |= needed
        return tuple(sorted(needed))

    def settle(
        self, kept: set[int], device: torch.device, returned: Sequence[torch.Tensor]
    ) -> tuple[dict[int, torch.UntypedStorage], list[Storage]]:
        """(storages that were there before the step, all of them as the graph knows them).

        The user may hold no tensors that the step has made but those that it has `returned`.

        The step's own are those that were seen to be made in it, those that nobody holds once we let them go, and
        those that it returns. A launch may be given memory of nobody's to read if it writes it too: it writes it first
        (Inductor's in_out_ptr of a reduction, an argument of a kernel of the user's).
        """
        if self._constant & self._written:
            raise CaptureError("the step makes a constant and writes into it: a replay would find it written already")
        devices = [storage.device for storage in self._alive]
        self._constant |= {number for number in self._read_first if devices[number] != device}
        survivors = self._let_go(kept)
        held = {number: storage for number, storage in survivors.items() if self._was_there(number, kept)}
        for number, name in self._read_first.items():
            if number not in held and not (number in self._made and number in self._filled_first):
                raise self._gone(number, name)
        if kept - held.keys() - self._written:
            raise CaptureError("the step returns memory that nothing in our sight has written")
        check_disjoint(held.values())
        own = {n: storage for n, storage in survivors.items() if n in self._made and devices[n] == device}
        self._check_let_go(own, returned)
        storages = [Storage(size, number not in held, number in survivors) for number, size in enumerate(self._sizes)]
        return held, storages

    def _was_there(self, number: int, kept: set[int]) -> bool:
        was_used = number in self._read_first or number in self._named_first or number not in self._written
        return number not in self._made and (was_used or number not in kept)

    def _gone(self, number: int, reader: str) -> CaptureError:
        """Of what is read though nothing wrote it and nobody holds it. What was there before is memory of somebody
        else's at the next replay, on one stream too."""
        if number in self._made:
            return CaptureError(f"{reader} reads memory that nothing in our sight has written")
        told = "a tensor that the step lets go of, and that was there before it or was made out of our sight"
        return ErraticError(f"{reader} reads {told}")

    def _check_let_go(self, own: Mapping[int, torch.UntypedStorage], returned: Sequence[torch.Tensor]) -> None:
        """Raises CaptureError when the user holds memory that the step has made.

        One plain graph writes that memory at every replay, planned launches write other memory in its place.
        """
        numbers = {storage._cdata: n for n, storage in own.items() if self._sizes[n] and n not in self._constant}
        for tensor in tensors_of_users(returned):
            number = numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                raise CaptureError(f"the step keeps a tensor that it made: what {self._made[number]} returned")

    def _let_go(self, kept: set[int]) -> dict[int, torch.UntypedStorage]:
        """The storages that live on without us, and those that we keep alive ourselves."""
        keep = kept | self._constant
        survivors = {number: storage for number, storage in enumerate(self._alive) if number in keep}
        weak = {n: StorageWeakRef(storage) for n, storage in enumerate(self._alive) if n not in keep}
        self._alive.clear()
        torch.clear_autocast_cache()  # casts of parameters, which would live as long as the user's autocast
        gc.collect()
        for number, reference in weak.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                survivors[number] = storage
        return survivors


def tensors_of_users(returned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All tensors that live in Python, but for those that a step has returned, gradients, and what these are views of.

    The gradient of a leaf that is no parameter is one of them only if it was returned. One that only C++ still holds (a
    cache, a node of an autograd graph) is there too, if Python has ever seen it.
    """
    alive = [each for each in live_tensors() if type(each) in PLAIN and torch._C._has_storage(each)]
    leaves = [each for each in alive if each.is_leaf and isinstance(each, torch.nn.Parameter)]
    known = [*returned, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    known += [tensor._base for tensor in known if tensor._base is not None]
    ours = set(map(id, known))
    return [each for each in alive if id(each) not in ours]


def check_plain(tensor: torch.Tensor) -> None:
    """Raises CaptureError for a tensor that is more than numbers at an offset of a storage."""
    if reason := why_not_plain(tensor):
        raise CaptureError(f"{reason} cannot be followed{at_line()}")


def why_not_plain(tensor: torch.Tensor) -> str | None:
    """What such a tensor is, in words, or None."""
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
    """Hazards are found by storage, so memory must belong to one of them only."""
    ranges = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
    for (_, end), (begin, _) in pairwise(ranges):
        if begin < end:
            raise CaptureError("two storages of the step share memory")


def at_line() -> str:
    line = user_line()
    return f" ({line[0]}:{line[1]})" if line else ""
