"""Records a training step while it runs: every launch, what it reads and writes, and how to issue it again.

A TorchDispatchMode below autograd sees every ATen operation. triton_adapter.py sees the kernels that bypass the
dispatcher.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.device.backend import allocations
from kitsune.device.cuda_graph import tensors_in
from kitsune.device.tensor_bytes import equal
from kitsune.errors import CaptureError, ErraticError
from kitsune.launches.model.launch_graph import Launch, LaunchGraph
from kitsune.launches.model.recording import Call, Recording, TensorView, generators_in, places_of, spans
from kitsune.launches.recording.copy_on_write import Undo
from kitsune.launches.recording.rng_tracking import Draws
from kitsune.launches.recording.storages import Storages, at_line
from kitsune.launches.recording.triton_adapter import TritonLaunch, triton_launches

#: Arguments that an operation writes without declaring it in its schema.
HIDDEN_WRITES: Final[Mapping[str, tuple[str, ...]]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten::_cudnn_rnn": ("weight_buf", "dropout_state"),
    "aten::_cudnn_rnn_backward": ("weight_buf", "dropout_state", "reserve"),
}
#: Operations that allocate memory and compute nothing.
ALLOCATIONS: Final = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
#: Operations that write all of their first argument and read none of it.
OVERWRITES: Final = frozenset(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential")
) | {"kitsune::cast_all"}
#: Operations that have no effect on any value.
WITHOUT_EFFECT: Final = frozenset({"aten::record_stream", "aten::is_pinned"})
#: Operations whose only effect is an error.
ASSERTIONS: Final = frozenset({"aten::_assert_async"})
#: Constants that come from the host. A replay uses the recorded values, as with any CUDA graph.
LIFTED: Final = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
#: Operations that change which memory a tensor refers to.
MOVES: Final = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
#: Matrix products by cuBLAS, which keeps a workspace of 32 MiB on an H200 for each thread and stream.
PRODUCTS: Final = frozenset(f"aten::{name}" for name in ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addmv"))
#: Namespaces whose schemas are trusted. All other operations are the user's.
TRUSTED: Final = ("aten", "prims", "prim", "inductor", "quantized", "mkldnn", "profiler", "kitsune")
COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")
MASKS: Final = (torch.bool, torch.uint8)
DEPENDS_ON_DATA: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of recording a step: the `recording`, or None with the reason in `refusal`. The step ran either way.

    `cut`: how many of the launches belong to the first of two parts. `is_erratic`: no graph can do what the step does.
    """

    recording: Recording | None
    refusal: str
    result: Any
    cut: int = 0
    is_erratic: bool = False


def record(
    step: Callable[[], Any], device: torch.device, then: Callable[[], Any] | None = None, undo: Undo | None = None
) -> Recorded:
    """Runs `step` once, for real, and records it. With `then`, runs and records that too, and returns both results.

    All memory of the step stays allocated until the end. `undo` copies what is about to be written.
    """
    observer = Observer(device, undo)
    cut = 0
    with allocations(device) as addresses, triton_launches(device, observer.saw_triton), observer:
        result = step()
        if then is not None:
            cut, result = observer.count, (result, then())
    try:
        return Recorded(observer.recording(result, addresses), "", result, cut)
    except CaptureError as error:
        return Recorded(None, str(error), result, is_erratic=isinstance(error, ErraticError))


class Observer(TorchDispatchMode):
    """Sees every launch of a step as it is issued. Errors are raised by `recording`, after the step, not during it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled code compiled under this mode."""
        return True

    def __init__(self, device: torch.device, undo: Undo | None = None) -> None:
        super().__init__()
        self._device = device
        self._undo = undo
        self._storages = Storages()
        self._draws = Draws(device)
        self._launches: list[Launch] = []
        self._calls: list[Call] = []
        self._refusal: CaptureError | None = None
        self._operation: Any = None  # the operation that runs now; Triton kernels that it launches are part of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            self._guarded(lambda: refuse_to_follow(func))
            return func(*args, **named)
        if func.namespace == "prim" or any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **named)  # tracing within the step: nothing is launched
        if is_composite(func, self._device):
            with self:
                return func.decompose(*args, **named)
        if is_view_of_storage(func, args):
            return func(*args, **named)
        self._about_to_run(func, args, named)
        given = self._guarded(lambda: self._check_and_place(func, args, named))
        before = self._guarded(lambda: copies_read(func, args, named))
        self._operation = func
        try:
            output = func(*args, **named)
        finally:
            self._operation = None
        self._guarded(lambda: check_unchanged(func, before or ()))
        self._guarded(lambda: self._check_places(func, given, args, named))
        self._guarded(lambda: self._saw(func, given, output))
        return output

    @property
    def count(self) -> int:
        """Launches so far."""
        return len(self._launches)

    def _about_to_run(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._undo is not None:
            written = written_of(func, args, named) if func.namespace in TRUSTED else (args, named)
            self._undo.about_to_write(tensors_in(written))
            self._undo.about_to_draw(generators_in((args, named)))

    def saw_triton(self, seen: TritonLaunch) -> None:
        """Called for a Triton kernel that is about to be launched."""
        if self._undo is not None:
            self._undo.about_to_write(seen.arguments[at] for at in seen.writes)
        if self._operation is None:
            self._guarded(lambda: self._saw_triton(seen))

    def recording(self, result: Any, addresses: Collection[int] = ()) -> Recording:
        """The recording. `result`: what the step returned; `addresses`: where the allocator gave it memory.

        Raises CaptureError when the step cannot be issued again, or when something in Python still holds a tensor that
        the step made and did not return.
        """
        if self._refusal is not None:
            raise self._refusal
        self._draws.check()
        placed = self._placed(result)
        self._storages.made_at(addresses)
        kept = {place.storage for place in places_of(placed)}
        held, storages = self._storages.settle(kept, self._device, tensors_in(result))
        calls = [replace(c, allocates=tuple(n for n in c.allocates if n not in held)) for c in self._calls]
        generators = dict.fromkeys(generators_in([(call.arguments, call.named) for call in calls]))
        graph = LaunchGraph.of(self._launches, storages)
        return Recording(self._device, graph, tuple(calls), held, placed, tuple(generators))

    def _guarded(self, note: Callable[[], Any]) -> Any:
        """Calls `note`, until one fails: that error ends the recording, but not the user's step."""
        if self._refusal is None:
            try:
                return note()
            except CaptureError as error:
                self._refusal = error
            except torch.OutOfMemoryError:
                self._refusal = CaptureError(
                    f"there is no memory to check what an operation of the user's writes{at_line()}"
                )
        return None

    def _check_and_place(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        check_replayable(func, args)
        if may_draw(func):
            self._draws.check(generators_in((args, named)))
        return self._placed((args, named))

    def _check_places(self, func: Any, given: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raises CaptureError when an operation resized what it writes, as `out=` may do within a tensor's memory."""
        is_writing = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if is_writing and self._placed((args, named)) != given:
            raise CaptureError(f"{short(func._schema.name)} changes the size of a tensor that it writes{at_line()}")

    def _saw(self, func: Any, given: Any, output: Any) -> None:
        name = func._schema.name
        results = tuple(self._placed(leaf) if torch.is_tensor(leaf) else None for leaf in pytree.tree_leaves(output))
        if name in ALLOCATIONS:
            self._storages.allocated(results, short(name))
        elif name in LIFTED:
            self._storages.lifted(results)
        elif name not in WITHOUT_EFFECT and not func.is_view:
            self._saw_launch(func, given, results)

    def _saw_launch(self, func: Any, given: Any, results: tuple[TensorView | None, ...]) -> None:
        reads, writes = accesses(func, *given)
        name = short(func._schema.name)
        self._storages.check_sizes(writes, name)
        touched = {place.storage for place in (*reads, *writes)}
        made = [place for place in results if place is not None and place.storage not in touched]
        if not made and not writes and func._schema.name not in ASSERTIONS:
            check_without_effect(func)
            return
        draws, is_product = may_draw(func) and self._draws.have_moved(), func._schema.name in PRODUCTS
        launch = Launch(name, spans(reads), spans([*writes, *made]), draws, keeps_workspace=is_product)
        self._storages.made(made, name)
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


def accesses(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[list[TensorView], list[TensorView]]:
    """(reads, writes) among the arguments of an operation, by its schema and the table of hidden writes."""
    given = arguments_of(func, args, named)[func._schema.name in OVERWRITES :]
    reads = places_of([value for argument, value in given if not argument.is_out])
    return list(reads), list(places_of(written_of(func, args, named)))


def written_of(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes, by its schema and the table of hidden writes."""
    hidden = HIDDEN_WRITES.get(func._schema.name, ())
    given = arguments_of(func, args, named)
    return [value for argument, value in given if argument.name in hidden or is_written(argument)]


def arguments_of(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(argument, value) for every argument of an operation's schema."""
    arguments = func._schema.arguments
    return [(one, args[at] if at < len(args) else named.get(one.name)) for at, one in enumerate(arguments)]


def short(name: str) -> str:
    """The name of an operation without its namespace."""
    return name.partition("::")[2]


def copies_read(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, tensor, copy) of the arguments that an operation of the user's declares as read only."""
    if func.namespace in TRUSTED:
        return []
    given = [(argument, tensors_in(value)) for argument, value in arguments_of(func, args, named)]
    written = {t.untyped_storage()._cdata for each, tensors in given if is_written(each) for t in tensors}
    read = [(each.name, t) for each, tensors in given if not is_written(each) for t in tensors]
    return [(name, t, t.clone()) for name, t in read if t.untyped_storage()._cdata not in written]


def check_unchanged(func: Any, before: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Raises CaptureError when an operation has written an argument that its schema declares as read only."""
    for name, tensor, copy in before:
        if not equal(tensor, copy):
            raise CaptureError(f"{func._schema.name} writes {name}, which its schema says it only reads{at_line()}")


def is_written(argument: Any) -> bool:
    """Whether the schema declares that the argument is written."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def is_composite(func: Any, device: torch.device) -> bool:
    """Whether it decomposes into other operations, which are recorded in its place. Seen under inference_mode only.

    A few operations, the backward of SiLU among them, also have a kernel of the device's own, which is what runs.
    """
    return has_kernel(func, "CompositeImplicitAutograd") and not has_kernel(func, device.type.upper())


def has_kernel(func: Any, dispatch_key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), dispatch_key))


def is_view_of_storage(func: Any, args: Sequence[Any]) -> bool:
    """Whether an empty tensor is set on another storage, as ATen does to view it (flat weights of a cuDNN LSTM)."""
    return bool(func._schema.name == "aten::set_" and args[0].untyped_storage().nbytes() == 0)


def may_draw(func: Any) -> bool:
    """Whether an operation may draw random numbers. One of the user's may do so without declaring it."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in TRUSTED


def check_replayable(func: Any, args: Sequence[Any]) -> None:
    """Raises CaptureError for an operation that depends on data, changes a tensor's memory, or is a collective."""
    name = func._schema.name
    if any(tag in func.tags for tag in DEPENDS_ON_DATA) and not picks_by_number(name, args):
        raise CaptureError(f"what {name} returns depends on the data{at_line()}")
    if name in MOVES:
        raise CaptureError(f"{name} changes which memory a tensor refers to{at_line()}")
    if func.namespace in COLLECTIVES:
        raise CaptureError(f"{name} communicates with other processes{at_line()}")


def check_without_effect(func: Any) -> None:
    """Raises CaptureError for an operation of the user's that returns no tensor and declares no writes."""
    if func.namespace not in TRUSTED:
        name = func._schema.name
        raise CaptureError(f"{name} returns no tensor and declares no writes, so its effect is unknown{at_line()}")


def refuse_to_follow(func: Any) -> None:
    """Raises CaptureError for a higher-order operator, which runs functions that it is given."""
    raise CaptureError(f"what {func.name()} runs cannot be followed{at_line()}")


def picks_by_number(name: str, args: Sequence[Any]) -> bool:
    """Whether it indexes with integers: the result's shape then depends on the indices' shape, not on mask values."""
    indices = [tensor for tensor in pytree.tree_leaves(args[1:2]) if torch.is_tensor(tensor)]
    return name == "aten::index" and all(index.dtype not in MASKS for index in indices)
