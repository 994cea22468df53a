"""Cross-entropy of large outputs that are in bf16, by Kitsune's kernel."""

import contextlib
from collections.abc import Mapping
from typing import Any, Final, Self

import torch
from torch.autograd.function import once_differentiable

from kitsune.autograd.half_outputs import HalfOutput, Memory, is_in_rows
from kitsune.base import optional_imports
from kitsune.errors import SURPRISES, UnfitError

#: The options that the kernel has. A class weight, or a deprecated option, is for torch's own loss.
DEFAULTS: Final[Mapping[str, Any]] = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}


class FusedLoss:
    """Cross-entropy in fp32 of logits in bf16, by Kitsune's kernel: it reads them once, and again for their gradient.

    On an H200, forward and backward over 4096 x 50257 logits take 522 us, and 697 as Inductor compiles them
    (results/kernels/2026-11-22-h200.jsonl).
    """

    def __init__(self) -> None:
        """Raises UnfitError without Triton."""
        self._kernel = optional_imports.load("kitsune.kernels.cross_entropy", extra="triton", packages=("triton",))
        self._has_failed = False

    @classmethod
    def if_possible(cls) -> Self | None:
        """None without Triton."""
        with contextlib.suppress(UnfitError):
            return cls()
        return None

    def __call__(self, logits: HalfOutput, target: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor | None:
        """The loss; None where torch's own has to do: also once the kernel has failed, which torch then tells about."""
        settings = {**DEFAULTS, **options}
        half = logits.as_half()
        if half is None or half.ndim < 2 or settings.keys() != DEFAULTS.keys():
            return None
        rows = half.movedim(1, -1)
        is_known = self._kernel.is_offered(rows, target, settings["label_smoothing"], settings["reduction"])
        is_read_once = rows.ndim == 2 or is_in_rows(rows)
        if self._has_failed or not (is_known and is_read_once and self._kernel.runs_in_triton(rows)):
            return None
        is_trained = torch.is_grad_enabled() and logits.requires_grad
        try:
            with torch._C.DisableTorchFunctionSubclass():
                loss: torch.Tensor = _Loss.apply(logits, self, rows.detach(), target, settings, is_trained)
        except SURPRISES:
            self._has_failed = True
            return None
        return loss.view(target.shape) if settings["reduction"] == "none" else loss

    def forward(
        self, rows: torch.Tensor, target: torch.Tensor, settings: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """(loss, what the backward reads)."""
        given = settings["ignore_index"], settings["label_smoothing"], settings["reduction"]
        found: tuple[torch.Tensor, ...] = self._kernel.forward(
            rows.flatten(0, -2), target.flatten(), *given, torch.float32
        )
        return found

    def backward(
        self,
        into: torch.Tensor,
        gradient: torch.Tensor,
        rows: torch.Tensor,
        target: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """Writes the gradient of the rows, which has their shape and is in rows itself."""
        given = settings["ignore_index"], settings["label_smoothing"]
        slopes = gradient.flatten() if gradient.ndim else gradient
        self._kernel.write_backward(into.flatten(0, -2), slopes, rows.flatten(0, -2), target.flatten(), *kept, *given)


class _Loss(torch.autograd.Function):
    """A loss of the values in bf16, for the graph of the output. Its gradient is an output in bf16 itself."""

    @staticmethod
    def forward(
        context: Any,
        logits: HalfOutput,
        fused: FusedLoss,
        rows: torch.Tensor,
        target: torch.Tensor,
        settings: Mapping[str, Any],
        is_trained: bool,
    ) -> torch.Tensor:
        loss, *kept = fused.forward(rows, target, settings)
        context.save_for_backward(target, *kept)
        context.fused, context.settings = fused, settings
        context.rows, context.graph = Memory(rows, None), logits.memory.graph
        context.into = None
        if context.graph is not None:
            context.graph.watch(context.rows)
            context.into = context.graph.take_gradient(logits.views) if is_trained else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        target, *kept = context.saved_tensors
        rows, into = context.rows.half, context.into
        context.into = None  # a second backward has memory of its own
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            context.rows = None  # the loop may hold the loss for long: the next forward would copy them
        is_static = into is not None and context.graph.is_current
        own = into if is_static else torch.empty_like(rows, memory_format=torch.contiguous_format)
        context.fused.backward(own, gradient, rows, target, tuple(kept), context.settings)
        given = HalfOutput.of(own.movedim(-1, 1), context.fused)
        if is_static:
            context.graph.watch_gradient(given.memory)
        return given, None, None, None, None, None
