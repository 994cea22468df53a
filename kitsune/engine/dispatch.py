"""Dispatch: which forwards of a model run by captured segments, and which run eagerly, with the reason."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.device import Recorder, Sync, watch_syncs
from kitsune.engine.body import Context, entered
from kitsune.engine.scaler import LossScaler
from kitsune.engine.segments import Scaled, Segments
from kitsune.engine.static import place, signature_of, tensors_of
from kitsune.errors import CaptureError

WARM_FORWARDS = 3
OTHER_SHAPE_PATIENCE = 8
MAX_SIGNATURES = 2
HALF = (torch.float16, torch.bfloat16)


class SegmentedForward:
    """A model's forward for training, by a plan: `forward` may be compiled, `plain` is the model as given.

    The first forwards of a batch signature are real and uncaptured; then forward and backward become two graphs.
    With `capture=False` nothing is ever captured and only contexts, layout and loss scaling apply.
    `refusal` says why nothing is captured any more.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        forward: Callable[..., Any],
        plain: Callable[..., Any],
        device: torch.device,
        *,
        capture: bool,
        contexts: Sequence[Context] = (),
        memory_format: torch.memory_format | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.capture = capture
        self.contexts = contexts
        self.memory_format = memory_format
        self.scaler = scaler
        self.refusal: str | None = None
        self.counts: dict[str, int] = {}
        self._last: Segments | None = None
        self._forward = forward
        self._plain = plain
        self._captured: dict[Any, Segments] = {}
        self._seen: dict[Any, int] = {}

    @property
    def is_settled(self) -> bool:
        return not self.capture or bool(self._captured) or self.refusal is not None

    def owner(self) -> Segments | None:
        """The segments whose static tensors all gradients are now, or None when they are anybody's."""
        return self._last if self._last is not None and self._last.owns_gradients() else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._last = None
        key = signature_of((args, kwargs)), torch.is_autocast_enabled(self.device.type)
        segments = self._captured.get(key)
        if segments is not None and not segments.unchanged():
            self._captured.clear()
            self._seen.clear()
            segments = None
        if segments is not None:
            return self._replay(segments, args, kwargs)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        other = key != next(iter(self._seen))
        if other and seen <= OTHER_SHAPE_PATIENCE:
            return self._eager("other_shape", self._plain, args, kwargs)
        if not self._wants_capture(args, kwargs):
            return self._eager("eager", self._forward, args, kwargs)
        warm = seen - OTHER_SHAPE_PATIENCE * other
        if warm < WARM_FORWARDS:  # the first one compiles, and compiling may wait for the device
            return self._eager("warm", self._forward, args, kwargs)
        if warm == WARM_FORWARDS:
            return self._watched(args, kwargs)
        return self._first_replay(key, args, kwargs)

    def _wants_capture(self, args: Any, kwargs: Any) -> bool:
        differentiable = any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
        return self.capture and self.refusal is None and not differentiable and len(self._captured) < MAX_SIGNATURES

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _watched(self, args: Any, kwargs: Any) -> Any:
        syncs: list[Sync] = []
        with watch_syncs(self.device, syncs):
            output = self._eager("warm", self._forward, args, kwargs)
        if syncs:
            file, line = syncs[0]
            self.refusal = f"the forward waits for the device at {file}:{line}"
        return output

    def _first_replay(self, key: Any, args: Any, kwargs: Any) -> Any:
        try:
            segments = Segments(
                self.model,
                self.optimizer,
                self._in_contexts(self._forward),
                # A pool for each signature: two forwards of different signatures may be outstanding together.
                Recorder(self.device),
                (args, kwargs),
                memory_format=self.memory_format,
                scaler=self.scaler,
            )
        except CaptureError as error:
            self.refusal = str(error)
            return self._eager("eager", self._forward, args, kwargs)
        self._captured[key] = segments
        return self._replay(segments, args, kwargs)

    def _replay(self, segments: Segments, args: Any, kwargs: Any) -> Any:
        if segments.is_waiting:
            return self._eager("in_flight", self._plain, args, kwargs)
        self._count("captured")
        self._last = segments
        return segments(*args, **kwargs)

    def _eager(self, what: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._count(what)
        args, kwargs = place((args, kwargs), self.device, self.memory_format)
        run = self._in_contexts(forward)
        return run(*args, **kwargs) if self.scaler is None else self._scaled(run, args, kwargs)

    def _scaled(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self.scaler is not None
        kept: dict[str, Any] = {}

        def live() -> list[torch.Tensor]:
            kept["leaves"], kept["spec"] = pytree.tree_flatten(run(*args, **kwargs))
            return [leaf for leaf in kept["leaves"] if isinstance(leaf, torch.Tensor)]

        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        outputs = iter(Scaled.apply(live, self.scaler, *parameters))
        leaves = [next(outputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in kept["leaves"]]
        return pytree.tree_unflatten(leaves, kept["spec"])

    def _in_contexts(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if not self.contexts:
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                stack.enter_context(entered(self.contexts))
                output = forward(*args, **kwargs)
            return pytree.tree_map(to_single, output)

        return run


def to_single(leaf: Any) -> Any:
    """Half-precision outputs become fp32, as autocast itself does before a loss."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF else leaf
