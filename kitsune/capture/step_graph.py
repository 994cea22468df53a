"""The whole step in one CUDA graph: a few real steps to warm up, one capture, then one replay a step.

Nothing runs twice: the warm-up steps are the first steps of the training, and a capture on CUDA executes nothing, so
parameters, statistics and generators see every step exactly once.
"""

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter, is_
from typing import Any

import torch

from kitsune.autograd.hooks import Hooks, why_skipped
from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.capture.guards import Attributes, ModelGuard
from kitsune.capture.side_effects import WatchedRun, why_not_filled
from kitsune.capture.step_body import Body, entered
from kitsune.device.backend import allocated_bytes, peak_bytes, reset_peak, side_stream
from kitsune.device.cuda_graph import WARM_RUNS, Graph, Recorder
from kitsune.device.static_batch import StaticBatch, place, tensors_of, why_not_static
from kitsune.errors import CaptureError
from kitsune.launches.execution.verified_recording import verified
from kitsune.launches.pipeline import Planner
from kitsune.launches.plans import Planned
from kitsune.launches.recording.recorder import Recorded
from kitsune.launches.timing_cache import TimingCache
from kitsune.update.optimizer_update import HYPERPARAMETER_CHANGED, is_starting

GRADIENT = attrgetter("grad")
MAX_WARM_STEPS = 32  # before a recording gives up on an optimizer that starts late (see `is_starting`)


class EagerStep:
    """Runs the body eagerly.

    `hooks` are watched when it is compiled: compiled code does not look for new ones. `forward` is a part of the body
    that captures itself.
    """

    settled_after = 2  # a compiled forward compiles in its first call, and may recompile in the second

    def __init__(
        self,
        body: Body,
        device: torch.device,
        memory_format: torch.memory_format | None,
        hooks: Hooks | None = None,
        forward: SegmentedForward | None = None,
    ) -> None:
        self._body = body
        self._device = device
        self._memory_format = memory_format
        self._hooks = hooks
        self._forward = forward
        self.calls = 0

    @property
    def is_settled(self) -> bool:
        return self.calls >= self.settled_after and (self._forward is None or self._forward.is_settled)

    def is_stale(self) -> bool:
        return self._hooks is not None and not self._hooks.unchanged()

    def holds(self) -> bool:
        """Eager code reads its hyperparameters in every step."""
        return not self.is_stale()

    def __call__(self, batch: tuple[Any, Any]) -> torch.Tensor:
        loss = self._body.step(place(batch, self._device, self._memory_format))
        self.calls += 1
        return loss


class StepGraph:
    """The body for one batch signature, in one CUDA graph.

    `refusal` says why the step cannot be captured, once that is known; the step in which it was found has run.
    `update_outside` says why the optimizer's update is not part of the graph, `streams_refusal` why launches cannot be
    planned for several `streams`.
    """

    def __init__(
        self,
        body: Body,
        recorder: Recorder,
        device: torch.device,
        memory_format: torch.memory_format | None,
        streams: int = 1,
        pool_bytes: int | None = None,
    ) -> None:
        self._body = body
        self._recorder = recorder
        self._device = device
        self._memory_format = memory_format
        self._streams = streams
        self._pool_bytes = pool_bytes
        self._graph: Graph | None = None
        self._planner: Planner | None = None
        self.calls = 0
        self.refusal: str | None = None
        self.streams_refusal = ""
        self.update_outside: str | None = None
        self.peak_bytes = 0

    @property
    def is_settled(self) -> bool:
        return self._graph is not None

    @property
    def plan(self) -> Planned | None:
        """The schedule of the graph's launches; None where none was planned."""
        return self._planner.plan if self._planner is not None and self.is_settled else None

    def __call__(self, batch: tuple[Any, Any]) -> torch.Tensor:
        if self._graph is not None:
            loss = self._replay(self._graph, batch)
        elif self._is_cold():
            loss = self._warm(batch)
        else:
            loss = self._capture(batch)
        self.calls += 1
        return loss

    def recorded(self, batch: tuple[Any, Any]) -> Recorded:
        """Runs the warm-up steps, then records the step that would be captured, which runs too. Also on a CPU."""
        while self._is_cold() and self.calls < MAX_WARM_STEPS:
            self._warm(batch)
            self.calls += 1
        if self.refusal:
            return Recorded(None, self.refusal, None)
        with self._static_step(batch) as launches, side_stream(self._device), entered(self._body.step_contexts):
            return verified(launches, self._device, tensors_of(self._static.batch), self._body.update.rates)

    def is_stale(self) -> bool:
        """Whether something that the graph has baked in has changed."""
        return self._graph is not None and not self._guard.unchanged()

    def holds(self) -> bool:
        """Whether the graph computes the step as it is now. Takes over learning rates.

        Drops the graph when another hyperparameter that it has baked in has changed.
        """
        if not self._guard.unchanged():
            return False
        update = self._body.update
        if self.update_outside or update.refresh():
            return True
        self.update_outside = update.why_not_capturable() or HYPERPARAMETER_CHANGED
        self._graph = None
        return False

    def _is_cold(self) -> bool:
        return self.calls < WARM_RUNS or is_starting(self._body.update.optimizer)

    def _warm(self, batch: tuple[Any, Any]) -> torch.Tensor:
        with side_stream(self._device):
            placed = place(batch, self._device, self._memory_format)
            if self.calls < WARM_RUNS - 1:
                loss = self._body.step(placed)
                self._attributes = Attributes(self._body.model, self._body.loss_fn)
                return loss
            loss = self._watched(batch, placed)
            self._body.update.step()
        return loss

    def _watched(self, batch: tuple[Any, Any], placed: tuple[Any, Any]) -> torch.Tensor:
        """The last warm-up step, in which what a capture would fail at, or leave out, is looked for."""
        replaced = self._attributes.why_replaced() or why_skipped(self._body.model, self._body.loss_fn)
        watched = WatchedRun("the step", self._body.model, self._device, self._body.loss_fn, given=batch)
        foreign: list[str | None] = []
        parameters = self._body.parameters

        def look(loss: torch.Tensor) -> None:
            foreign.append(watched.why_not_ours([loss], parameters, "the model or the optimizer"))

        with watched.syncs:
            loss = self._body.gradients(placed, look=look)
        gradients = [parameter.grad for parameter in self._body.parameters]
        self.refusal = (
            replaced
            or watched.why_not_replayed()
            or why_not_filled(gradients)
            or why_not_static(batch)
            or next(filter(None, foreign), None)
        )
        return loss

    def _capture(self, batch: tuple[Any, Any]) -> torch.Tensor:
        if reason := why_skipped(self._body.model, self._body.loss_fn):  # hooks that came after the last warm-up step
            raise CaptureError(reason)
        with self._static_step(batch) as launches:
            graph, result, has_run = self._captured(launches)
        self._guard = ModelGuard(self._body.model, self._body.update.optimizer, self._body.loss_fn)
        self._graph, (self._loss, self._gradients) = graph, result
        self._parameters = self._body.parameters
        self.peak_bytes = self._needed_bytes()
        if graph is not None and not has_run:
            graph.replay()
        return self._results()

    @contextlib.contextmanager
    def _static_step(self, batch: tuple[Any, Any]) -> Iterator[Callable[[], Any]]:
        """The step without arguments: on static tensors of the batch, and, within the block, of the learning rates."""
        update = self._body.update
        self.update_outside = self.update_outside or update.why_not_capturable()
        update.clips_apart = bool(self.update_outside)
        self._static = StaticBatch(batch, self._device, self._memory_format)
        self._body.clear()
        reset_peak(self._device)
        function = self._body.gradients if self.update_outside else self._body.step

        def launches() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            loss = function(self._static.batch, fresh=True)
            return loss, [parameter.grad for parameter in self._body.parameters]

        update.begin_capture()
        try:
            yield launches
        finally:
            update.end_capture()

    def _captured(self, launches: Callable[[], Any]) -> tuple[Graph | None, Any, bool]:
        """(the graph, its result tensors, whether these hold the results of a real run)."""
        if self._streams == 1 or self.streams_refusal:
            return *self._recorder.capture(launches), self._recorder.executes
        planner = Planner(self._recorder, self._streams, self._pool_bytes, TimingCache.of_this_machine())
        # Launches are issued again in the contexts of the step: TF32 is on only there. The update runs in them, too;
        # the optimizers that may be captured (Adam, AdamW, SGD) have no matrix products.
        with side_stream(self._device), entered(self._body.step_contexts):
            graph, result = planner.capture(launches, tensors_of(self._static.batch), self._body.update.rates)
        self.streams_refusal = planner.refusal
        if planner.is_erratic:
            self.refusal = planner.refusal
        self._planner = planner  # holds the constants that the graph reads by address
        return graph, result, True

    def _needed_bytes(self) -> int:
        """Peak bytes in tensors while the graph runs, without what recording, timing and proving took."""
        if self._graph is None:
            return 0
        if self._planner is None or self._planner.plan is None:
            return peak_bytes(self._device)
        return allocated_bytes(self._device) + self._planner.passing_bytes

    def _replay(self, graph: Graph, batch: tuple[Any, Any]) -> torch.Tensor:
        self._static.load(batch)
        graph.replay()
        return self._results()

    def _results(self) -> torch.Tensor:
        """Puts the graph's gradients into place, updates where the graph does not, and copies the loss."""
        if not all(map(is_, map(GRADIENT, self._parameters), self._gradients)):  # after zero_grad, say
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                self._body.set_gradient(parameter, gradient)
        if self.update_outside:
            self._body.update.step()
        # A copy: the next replay overwrites the graph's own loss, and users keep losses.
        return self._loss.clone()
