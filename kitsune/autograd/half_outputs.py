"""Large outputs of a captured forward, left in bf16 and in the memory of the graph until they are read.

Autocast computes logits in bf16, and a loss reads them in fp32. Where a loop hands them to a loss and does nothing else
with them, the copy out of the graph, the cast, and the passes of an eager loss over fp32 take longer than the loss
itself.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from kitsune.kernels.layouts import MOST_PADDING

#: Bytes of an output in fp32 from which on it is worth the host time of a subclass: the 13 passes of copies and an
#: eager loss over it take 0.1 ms at the 4.3 TB/s of an H200.
LEAST_BYTES: Final = 32 * 2**20
#: Not fp16: gradients of a mean over many rows underflow in it before they are scaled.
HALF: Final = torch.bfloat16
#: Arguments of cross_entropy after the logits, in order.
CROSS_ENTROPY: Final = (
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)
#: Views that the values in bf16 do not have.
ALIASES: Final = frozenset({torch.ops.aten.view.dtype, torch.ops.aten.as_strided.default})

#: What reads or writes the memory of a tensor without an operation of torch's.
OUTSIDE: Final = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__repr__,
        torch.Tensor.data_ptr,
        torch.Tensor.__cuda_array_interface__.__get__,
    }
)

#: The assignment to `.data`.
SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]

View = Callable[[torch.Tensor], torch.Tensor]
#: The loss of an output, for a target and by options of cross_entropy; None where torch's own has to do.
Loss = Callable[["HalfOutput", torch.Tensor, Mapping[str, Any]], torch.Tensor | None]
SINGLE: Final = attrgetter("single")


class Memory:
    """The values of one output: in bf16 where the graph put them, and in fp32 once they are read."""

    def __init__(
        self,
        half: torch.Tensor | None,
        loss: Loss | None,
        single: torch.Tensor | None = None,
        graph: "StaticOutputs | None" = None,
    ) -> None:
        self.half = half
        self.loss = loss
        self.graph = graph
        self._single = single

    @property
    def single(self) -> torch.Tensor:
        if self._single is None:
            assert self.half is not None
            with torch.inference_mode(False):  # it outlives the block of the operation that reads it first
                self._single = self.half.to(torch.float32, memory_format=torch.contiguous_format)
        return self._single

    def write(self) -> None:
        """From now on the values are those in fp32, which the loop may write."""
        self._single, self.half = self.single, None

    def leave_graph(self) -> None:
        """Copies the values out of the memory of the graph; those that were read are in fp32 already."""
        self.half = self.half.clone() if self.half is not None and self._single is None else None


class StaticOutputs:
    """The outputs of one forward whose values are in the memory of its graph.

    `gradient`: where the backward's graph reads the gradient of the one output that has one. One loss may write there,
    once, until the next forward.
    """

    def __init__(self, loss: Loss | None, gradient: torch.Tensor | None = None) -> None:
        self.loss = loss
        self.is_current = True
        self._gradient = gradient
        self._memories: list[weakref.ref[Memory]] = []
        self._gradients: list[weakref.ref[Memory]] = []

    def output(self, half: torch.Tensor) -> torch.Tensor:
        """A tensor in the memory of the graph, as the loop gets it: in fp32, with the gradient of a cast."""
        given: torch.Tensor = _AsSingle.apply(half, self)
        return given

    def take_gradient(self, views: "tuple[View, ...]") -> torch.Tensor | None:
        """Rows for the gradient of the view of the output, classes last; None if they are not all of it, or taken."""
        rows = whole = self._gradient
        if rows is None or whole is None:
            return None
        for view in views:
            rows = view(rows)
        rows = rows.movedim(1, -1)
        if not is_in_rows(rows) or rows.numel() != whole.numel():
            return None
        self._gradient = None
        return rows

    def watch(self, memory: Memory) -> None:
        """Values in the memory of the graph, which are copied if they are still there when it is written."""
        self._memories.append(weakref.ref(memory))

    def watch_gradient(self, memory: Memory) -> None:
        self._gradients.append(weakref.ref(memory))

    def leave_graph(self) -> None:
        """To be called before a replay overwrites the outputs."""
        leave(self._memories)

    def leave_gradient(self) -> None:
        """To be called before the gradient is overwritten."""
        leave(self._gradients)

    def end(self) -> None:
        """To be called before the next forward: no loss writes the gradient any more."""
        self.is_current = False
        self.leave_graph()
        self.leave_gradient()


def leave(memories: list[weakref.ref[Memory]]) -> None:
    for reference in memories:
        memory = reference()
        if memory is not None:
            memory.leave_graph()
    memories.clear()


class HalfOutput(torch.Tensor):
    """An fp32 tensor whose values are in bf16 until an operation reads them.

    It stands below autograd: views, hooks and gradients are those of any tensor. `cross_entropy` reads the values in
    bf16, and its gradient is such a tensor too.
    """

    memory: Memory
    views: tuple[View, ...]  # that lead from the values in memory to this tensor

    @staticmethod
    def __new__(cls, memory: Memory, views: tuple[View, ...], like: torch.Tensor, device: torch.device) -> Self:
        """`like` has size and strides of the result, on any device."""
        with torch.inference_mode(False):  # a view of an ordinary tensor is one
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                like.size(),
                strides=like.stride(),
                storage_offset=like.storage_offset(),
                dtype=torch.float32,
                device=device,
            )
        made.memory, made.views = memory, views
        given: Self = made
        return given

    @classmethod
    def of(cls, half: torch.Tensor, loss: Loss | None, graph: StaticOutputs | None = None) -> Self:
        half = half.detach()
        like = torch.empty(half.shape, dtype=torch.float32, device="meta")
        return cls(Memory(half, loss, graph=graph), (), like, half.device)

    @property
    def single(self) -> torch.Tensor:
        """The values in fp32, in the memory that all views of the output share."""
        return self._viewed(self.memory.single)

    def as_half(self) -> torch.Tensor | None:
        """The values in bf16; None where the loop has written others, or where they have no such view."""
        try:
            return None if self.memory.half is None else self._viewed(self.memory.half)
        except RuntimeError:  # rows of the graph may have gaps between them
            return None

    def as_plain(self) -> torch.Tensor:
        """A copy that is no HalfOutput, for other subclasses of torch.Tensor and types that act as one."""
        with torch._C.DisableTorchFunctionSubclass():
            return self + 0

    def _viewed(self, values: torch.Tensor) -> torch.Tensor:
        for view in self.views:
            values = view(values)
        return values

    @property
    def is_fake(self) -> bool:
        """Whether it has no values: torch.compile made it as an example of an output."""
        return isinstance(self.memory._single, FakeTensor)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """For torch.compile, which traces code of the user's with the values in fp32."""
        return ["single"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, torch.Tensor], *_: Any) -> Self:
        single = inner["single"]
        return cls(Memory(None, None, single), (), single, single.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.single.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        made: torch.Tensor = copy.deepcopy(self.single, memo) if self.is_leaf else super().__deepcopy__(memo)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if any(kind not in (cls, torch.Tensor, torch.nn.Parameter) for kind in types):
            return func(*mapped(HalfOutput.as_plain, args), **mapped(HalfOutput.as_plain, options))
        if func in OUTSIDE and isinstance(args[0], HalfOutput):
            plain = args[0].single.detach().requires_grad_(args[0].requires_grad)
            args[0].memory.write()
            return func(plain, *args[1:], **options)
        if func == SET_DATA and isinstance(args[0], HalfOutput):
            args[0].memory.write()
            args[0].single.copy_(args[1])
            return None
        if func is F.cross_entropy and (loss := loss_in_half(args, options)) is not None:
            return loss
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        first = args[0] if args else None
        if func is torch.ops.aten.detach.default and isinstance(first, HalfOutput):
            # torch.compile recognises a subclass by this result
            return HalfOutput(first.memory, first.views, first.as_meta(), first.device)
        if func.is_view and isinstance(first, HalfOutput) and first.memory.half is not None:
            return first.view_by(func, args[1:], options)
        if func is torch.ops.aten.clone.default and isinstance(first, HalfOutput):
            return cls.__tensor_unflatten__({"single": first.single.clone(**options)})
        found = func(*mapped(SINGLE, args), **mapped(SINGLE, options))
        if not func._schema.is_mutable:
            return found
        written = [each for each in pytree.tree_leaves((args, options)) if isinstance(each, HalfOutput)]
        for each in written:
            each.memory.write()
        return first if isinstance(first, HalfOutput) and isinstance(found, torch.Tensor) else found

    def view_by(self, func: Any, args: Any, options: Mapping[str, Any]) -> Any:
        """The view that an operator gives, still in bf16."""

        def view(values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = func(values, *args, **options)
            return found

        like = func(self.as_meta(), *args, **options)
        if isinstance(like, torch.Tensor) and func not in ALIASES:
            return HalfOutput(self.memory, (*self.views, view), like, self.device)
        self.memory.write()  # the loop may write into several views at once, and it is not seen
        return func(self.single, *args, **options)

    def as_meta(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.float32, device="meta")
        return empty.as_strided(self.size(), self.stride(), self.storage_offset())


def loss_in_half(args: Any, options: Mapping[str, Any]) -> torch.Tensor | None:
    """cross_entropy(*args, **options) of logits in bf16; None where the plain one has to do."""
    given = {**dict(zip(("input", *CROSS_ENTROPY), args, strict=False)), **options}
    logits, target = given.pop("input", None), given.pop("target", None)
    if type(logits) is not HalfOutput or type(target) is not torch.Tensor or target.requires_grad:
        return None
    if torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active():
        return None
    fused = logits.memory.loss
    return (
        None if fused is None else fused(logits, target, {name: own for name, own in given.items() if own is not None})
    )


class _AsSingle(torch.autograd.Function):
    """The cast of an output to fp32, which is made when it is read."""

    @staticmethod
    def forward(_: Any, half: torch.Tensor, graph: StaticOutputs) -> torch.Tensor:
        given = HalfOutput.of(half, graph.loss, graph)
        graph.watch(given.memory)
        return given

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = gradient.as_half() if isinstance(gradient, HalfOutput) else None
        return gradient.to(HALF) if own is None else own, None


def mapped(function: Callable[[HalfOutput], torch.Tensor], arguments: Any) -> Any:
    """The arguments, with what the function makes of outputs in their place."""
    return pytree.tree_map(lambda one: function(one) if isinstance(one, HalfOutput) else one, arguments)


def is_in_rows(tensor: torch.Tensor) -> bool:
    """Whether it is rows of contiguous elements at one distance from each other, with or without gaps between them."""
    steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    sizes = [size for size in tensor.shape[:-1] if size > 1]
    is_regular = all(step == size * inner for step, size, inner in zip(steps, sizes[1:], steps[1:], strict=False))
    do_overlap = bool(steps) and steps[-1] < tensor.shape[-1]
    return tensor.stride(-1) == 1 and is_regular and not do_overlap


def gradient_like(output: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `make` gives for the output; with gaps between its rows, which are zeros, where the output has gaps."""
    dense = make(output.detach())
    if output.ndim < 2 or not 0 < output.stride(-2) - output.shape[-1] <= MOST_PADDING:
        return dense
    padded = output.detach().new_zeros(*output.shape[:-1], output.stride(-2))[..., : output.shape[-1]]
    return padded.copy_(dense) if padded.stride() == output.stride() else dense


def stays_half(output: Any) -> bool:
    """Whether an output of a captured forward is large enough to stay in bf16 until it is read."""
    is_half = isinstance(output, torch.Tensor) and output.dtype == HALF and output.requires_grad
    return is_half and 4 * output.numel() >= LEAST_BYTES
