"""Large outputs of a captured forward, left in half precision and in the memory of the graph until they are read.

Autocast computes logits in half precision, and a loss reads them in fp32. Where a loop hands them to a loss and does
nothing else with them, the copy out of the graph, the cast, and the passes of an eager loss over fp32 take longer than
the loss itself.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F

from kitsune.errors import SURPRISES

#: Bytes of an output in fp32 from which on a compiled loss is worth its host time: about 25 passes over it on an H200
#: take 0.2 ms.
LEAST_BYTES: Final = 32 * 2**20
HALF: Final = (torch.float16, torch.bfloat16)
PLAIN: Final = torch._C.DisableTorchFunctionSubclass
#: Methods that return a view of the same memory, or this tensor.
VIEWS: Final = frozenset(
    {
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.Tensor.flatten,
        torch.Tensor.transpose,
        torch.Tensor.permute,
        torch.Tensor.squeeze,
        torch.Tensor.unsqueeze,
        torch.Tensor.contiguous,
        torch.reshape,
        torch.flatten,
        torch.transpose,
        torch.permute,
    }
)
SAME: Final = ("shape", "ndim", "device", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_sparse", "layout")
#: What is the same for a tensor in half precision.
FACTS: Final = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.stride,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.__len__,
        torch.is_tensor,
        torch.is_floating_point,
        *(getattr(torch.Tensor, name).__get__ for name in SAME),
    }
)
#: What asks for the gradient of a tensor itself.
LISTENS: Final = (torch.Tensor.register_hook, torch.Tensor.retain_grad)
DTYPE: Final = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]

#: The loss of these logits and targets, with the other arguments of cross_entropy.
Loss = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor]


class FusedLoss:
    """Cross-entropy in fp32 of logits in half precision; for each set of options a function that `compiled` makes."""

    def __init__(self, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._compiled = compiled
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, logits: torch.Tensor, target: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        key = tuple(sorted(options.items()))
        if key not in self._functions:

            def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return F.cross_entropy(logits.float(), target, **options)

            self._functions[key] = self._compiled(loss)
        found: torch.Tensor = self._functions[key](logits, target)
        return found


class StaticOutputs:
    """Outputs of one forward that are still in the memory of its graph."""

    def __init__(self, loss: Loss | None) -> None:
        self.loss = loss
        self.is_listened_to = False
        self._alive: list[weakref.ref[HalfOutput]] = []

    def output(self, half: torch.Tensor) -> "HalfOutput":
        """A tensor in half precision, in the memory of the graph, as the loop gets it."""
        given = half.as_subclass(HalfOutput)
        given.source = self
        self._alive.append(weakref.ref(given))
        return given

    def leave_memory(self) -> None:
        """Copies what the loop still holds and has not read: to be called before a replay overwrites the memory."""
        for reference in self._alive:
            given = reference()
            if given is not None and given.read is None:
                with torch.no_grad(), PLAIN():
                    given.data = given.detach().clone()
        self._alive.clear()
        self.loss = None


class HalfOutput(torch.Tensor):
    """An fp32 tensor to all who ask; its memory is in half precision until it is read otherwise than by a loss.

    Views of it and cross_entropy take it as it is. Anything else makes the fp32 tensor, `read`, which then stands for
    it and, as their memory is one, for its views. Its gradient is that of the output of the model in any case.
    """

    source: StaticOutputs
    read: torch.Tensor | None = None
    viewed: "tuple[HalfOutput, Callable[[torch.Tensor], torch.Tensor]] | None" = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        first = args[0] if args else options.get("input")
        if isinstance(first, HalfOutput) and func in LISTENS:
            first.source.is_listened_to = True
        elif isinstance(first, HalfOutput) and first.is_unread:
            if func == DTYPE:
                return torch.float32
            if func in FACTS:
                with PLAIN():
                    return func(*args, **options)
            if func in VIEWS and (view := first.view_by(func, args[1:], options)) is not None:
                return view
            if is_cast_to_single(func, args[1:], options):
                return first
            if func is F.cross_entropy and (loss := first.loss_by(args[1:], options)) is not None:
                return loss
        with PLAIN():
            return func(*map_read(args), **map_read(options))

    def view_by(self, func: Any, args: Any, options: Mapping[str, Any]) -> "HalfOutput | None":
        """The result of the function, if it is in the same memory."""
        with PLAIN():
            half = func(self.as_subclass(torch.Tensor), *args, **options)
            is_view = half.data_ptr() == self.data_ptr() and half.numel() == self.numel()
            if not is_view:
                return None
            given = half.as_subclass(HalfOutput)
        given.source = self.source
        given.viewed = self, lambda read: func(read, *args, **options)
        return given

    def loss_by(self, args: Any, options: Mapping[str, Any]) -> torch.Tensor | None:
        """The cross-entropy with these arguments; None where the plain one has to do."""
        given = {**dict(zip(CROSS_ENTROPY, args, strict=False)), **options}
        given.pop("input", None)
        target = given.pop("target", None)
        fused = self.source.loss
        is_ours = fused is not None and isinstance(target, torch.Tensor) and not isinstance(target, HalfOutput)
        if fused is None or not is_ours or target.requires_grad or given.get("weight") is not None:
            return None
        with PLAIN():
            try:
                return fused(self.as_subclass(torch.Tensor), target, given)
            except SURPRISES:  # the plain loss will do, or tell the user what is wrong
                self.source.loss = None
                return None

    @property
    def is_unread(self) -> bool:
        return self.read is None and (self.viewed is None or self.viewed[0].is_unread)

    def as_read(self) -> torch.Tensor:
        if self.read is None and self.viewed is not None:
            origin, view = self.viewed
            self.read = view(origin.as_read())
        elif self.read is None:
            with PLAIN():
                self.read = self.as_subclass(torch.Tensor).float()
        assert self.read is not None
        return self.read


CROSS_ENTROPY: Final = (
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def is_cast_to_single(func: Any, args: Any, options: Mapping[str, Any]) -> bool:
    """Whether the function makes an fp32 tensor of its first argument and does nothing else."""
    if func is torch.Tensor.float:
        return not options
    return func is torch.Tensor.to and (*args, *options.values()) == (torch.float32,)


def map_read(arguments: Any) -> Any:
    """The arguments, with what is read in the place of outputs in half precision."""
    if isinstance(arguments, HalfOutput):
        return arguments.as_read()
    if isinstance(arguments, dict):
        return {name: map_read(value) for name, value in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(map(map_read, arguments))
    return arguments


def stays_half(output: Any) -> bool:
    """Whether an output of a captured forward is large enough to stay in half precision until it is read."""
    is_half = isinstance(output, torch.Tensor) and output.dtype in HALF and output.requires_grad
    return is_half and 4 * output.numel() >= LEAST_BYTES
