"""A training step that runs once in, a Recording out: every launch, what it touches, and how to issue it again.

The dispatcher shows every ATen operation below autograd, kitsune/engine/triton_launches.py the kernels that bypass it.
Storages are held, not tensors: a gradient that somebody else holds cannot be stolen by its parameter, and each would be
copied (270-520 us a step of BERT-base on an H200). A storage is told by its StorageImpl, since autograd gives saved
tensors back as other TensorImpls.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.device import own_pool, user_line
from kitsune.engine.graph import Launch, LaunchGraph, Span, Storage
from kitsune.engine.triton_launches import TritonLaunch, triton_launches
from kitsune.errors import CaptureError

#: Arguments that an operation writes though its schema does not say so.
HIDDEN_WRITES: Final[Mapping[str, tuple[str, ...]]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::_cudnn_rnn": ("weight_buf", "dropout_state"),
    "aten::_cudnn_rnn_backward": ("weight_buf", "dropout_state", "reserve"),
}
#: They give memory, not values.
ALLOCATIONS: Final = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
#: They write all of their first argument and read none of it.
OVERWRITES: Final = frozenset(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential")
)
#: They have no effect on any value.
IDLE: Final = frozenset({"aten::record_stream", "aten::is_pinned"})
#: Values that come from the host and are baked in, as a CUDA graph bakes them in.
LIFTED: Final = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
#: They change which memory a tensor means.
MOVES: Final = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")
MASKS: Final = (torch.bool, torch.uint8)
DEPENDS_ON_DATA: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the recording: geometry, in elements, on a storage of the graph."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def span(self) -> Span:
        """The bytes between the first and the last element; those that a stride skips are counted in."""
        width = self.dtype.itemsize
        if 0 in self.size:
            return Span(self.storage, self.offset * width, self.offset * width)
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return Span(self.storage, self.offset * width, (last + 1) * width)


@dataclass(frozen=True, slots=True)
class Call:
    """How to issue a launch again: places stand for the tensors among `arguments` and `named`.

    `in_grad_mode` is part of it, since operations ask for it (an LSTM on a CPU keeps its workspace by it). `results`
    has one entry for each leaf of what the call returns, None where that is no tensor. `allocates` are the storages
    that nobody has made yet, and that have to be there before the call.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    in_grad_mode: bool = False
    results: tuple[Place | None, ...] = ()
    allocates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """One step: `calls` belong to `graph.launches`, one to one. `held` are the storages that were there before it.

    `result` is what the step returned, with places for its tensors.
    """

    device: torch.device
    graph: LaunchGraph
    calls: tuple[Call, ...]
    held: Mapping[int, torch.UntypedStorage]
    result: Any


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came of recording a step: the `recording`, or None and the reason in `refusal`. The step ran either way.

    `cut`: how many of its launches belong to the first of two parts.
    """

    recording: Recording | None
    refusal: str
    result: Any
    cut: int = 0


def record(step: Callable[[], Any], device: torch.device, then: Callable[[], Any] | None = None) -> Recorded:
    """Runs `step` once, for real; `then` after it, and the result is that of both. All memory stays until the end."""
    observer = Observer(device)
    cut = 0
    with own_pool(device) as addresses, triton_launches(device, observer.saw_triton), observer:
        result = step()
        if then is not None:
            cut, result = observer.count, (result, then())
    try:
        return Recorded(observer.recording(result, addresses), "", result, cut)
    except CaptureError as error:
        return Recorded(None, str(error), result)


class Observer(TorchDispatchMode):
    """Sees every launch of a step as it is issued. What cannot be issued again is told at the end, not in mid-step."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._storages = Storages()
        self._launches: list[Launch] = []
        self._calls: list[Call] = []
        self._refusal: CaptureError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **named)
        if is_view_of_storage(func, args):
            return func(*args, **named)
        given = self._noted(lambda: self._given(func, args, named))
        output = func(*args, **named)
        self._noted(lambda: self._saw(func, given, output))
        return output

    @property
    def count(self) -> int:
        """Launches so far."""
        return len(self._launches)

    def saw_triton(self, seen: TritonLaunch) -> None:
        """A Triton kernel that is about to be launched."""
        self._noted(lambda: self._saw_triton(seen))

    def recording(self, result: Any, addresses: Sequence[range] = ()) -> Recording:
        """All that was seen; `result` is what the step has returned, `addresses` where it allocated.

        Raises CaptureError.
        """
        if self._refusal is not None:
            raise self._refusal
        placed = self._placed(result)
        self._storages.made_within(addresses)
        held, storages = self._storages.settle({place.storage for place in places_of(placed)}, self._device)
        calls = [replace(c, allocates=tuple(n for n in c.allocates if n not in held)) for c in self._calls]
        return Recording(self._device, LaunchGraph.of(self._launches, storages), tuple(calls), held, placed)

    def _noted(self, note: Callable[[], Any]) -> Any:
        """The first thing that cannot be followed ends the recording, and not the user's step."""
        if self._refusal is None:
            try:
                return note()
            except CaptureError as error:
                self._refusal = error
        return None

    def _given(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        check_replayable(func, args)
        return self._placed((args, named))

    def _saw(self, func: Any, given: Any, output: Any) -> None:
        name = func._schema.name
        results = tuple(self._placed(leaf) if torch.is_tensor(leaf) else None for leaf in pytree.tree_leaves(output))
        if name in ALLOCATIONS:
            self._storages.allocated(results)
        elif name in LIFTED:
            self._storages.lifted(results)
        elif name not in IDLE and not func.is_view:
            self._saw_launch(func, given, results)

    def _saw_launch(self, func: Any, given: Any, results: tuple[Place | None, ...]) -> None:
        reads, writes = accesses(func, *given)
        touched = {place.storage for place in (*reads, *writes)}
        made = [place for place in results if place is not None and place.storage not in touched]
        if not made and not writes:
            return
        draws = torch.Tag.nondeterministic_seeded in func.tags
        launch = Launch(func._schema.name.partition("::")[2], spans(reads), spans([*writes, *made]), draws)
        self._storages.made(made)
        arguments, named = given
        self._keep(launch, Call(func, arguments, named, torch.is_grad_enabled(), results))

    def _saw_triton(self, seen: TritonLaunch) -> None:
        arguments, named = self._placed(seen.arguments), self._placed(seen.named)
        reads = [place for at in seen.reads for place in places_of(arguments[at])]
        writes = [place for at in seen.writes for place in places_of(arguments[at])]
        self._keep(Launch(seen.name, spans(reads), spans(writes)), Call(seen.function, arguments, named))

    def _keep(self, launch: Launch, call: Call) -> None:
        self._launches.append(launch)
        self._calls.append(replace(call, allocates=self._storages.touched(launch)))

    def _placed(self, tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: self._storages.place(leaf) if torch.is_tensor(leaf) else leaf, tree)


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

    def made_within(self, addresses: Sequence[range]) -> None:
        """Inductor allocates without the dispatcher: an address tells where such a storage comes from."""
        places = ((number, storage.data_ptr()) for number, storage in enumerate(self._alive))
        self._made |= {number for number, at in places if any(at in one for one in addresses)}

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


def accesses(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[list[Place], list[Place]]:
    """What an operation reads and what it writes of its arguments, by its schema and by the table of hidden writes."""
    name = func._schema.name
    hidden = HIDDEN_WRITES.get(name, ())
    reads: list[Place] = []
    writes: list[Place] = []
    for at, argument in enumerate(func._schema.arguments):
        found = list(places_of(args[at] if at < len(args) else named.get(argument.name)))
        if argument.name in hidden or (argument.alias_info is not None and argument.alias_info.is_write):
            writes += found
        if not argument.is_out and not (at == 0 and name in OVERWRITES):
            reads += found
    return reads, writes


def places_of(tree: Any) -> Iterator[Place]:
    return (leaf for leaf in pytree.tree_leaves(tree, is_leaf=is_place) if is_place(leaf))


def spans(places: Iterable[Place]) -> tuple[Span, ...]:
    return tuple(dict.fromkeys(place.span() for place in places))


def is_place(value: Any) -> bool:
    return isinstance(value, Place)


def is_composite(func: Any) -> bool:
    """Whether it is made of other operations, which are what is launched; only inference_mode lets it come this far."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def is_view_of_storage(func: Any, args: Sequence[Any]) -> bool:
    """How ATen looks at a storage of others: an empty tensor is set on it (the flat weights of a cuDNN LSTM)."""
    return bool(func._schema.name == "aten::set_" and args[0].untyped_storage().nbytes() == 0)


def check_replayable(func: Any, args: Sequence[Any]) -> None:
    """Raises CaptureError for an operation whose launches depend on data, or that we cannot follow."""
    name = func._schema.name
    if any(tag in func.tags for tag in DEPENDS_ON_DATA) and not picks_by_number(name, args):
        raise CaptureError(f"what {name} returns depends on the data{at_line()}")
    if name in MOVES:
        raise CaptureError(f"{name} changes which memory a tensor means{at_line()}")
    if func.namespace in COLLECTIVES:
        raise CaptureError(f"{name} talks to other processes{at_line()}")


def picks_by_number(name: str, args: Sequence[Any]) -> bool:
    """Indexing with numbers gives a shape that the indices tell; with a mask, one that its values tell."""
    indices = [tensor for tensor in pytree.tree_leaves(args[1:2]) if torch.is_tensor(tensor)]
    return name == "aten::index" and all(index.dtype not in MASKS for index in indices)


def check_plain(tensor: torch.Tensor) -> None:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
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
