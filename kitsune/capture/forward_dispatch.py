"""Decides for each forward of a model whether captured graphs or eager code run it, and counts the reasons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.autograd.half_outputs import Loss, stays_half
from kitsune.autograd.hooks import why_skipped
from kitsune.autograd.leaves import tensors_there
from kitsune.autograd.outputs import PARTIAL, Listeners, Past
from kitsune.autograd.sole_outputs import SoleOutputs
from kitsune.capture.autograd_node import enclosed
from kitsune.capture.guards import Attributes
from kitsune.capture.program_cache import ProgramCache, autocast_of
from kitsune.capture.segment_graphs import Segments, why_not_joined
from kitsune.capture.side_effects import WatchedRun
from kitsune.capture.step_body import Context, entered
from kitsune.capture.unkept_caches import is_cache
from kitsune.device.cuda_graph import WARM_RUNS, Recorder, tensors_in
from kitsune.device.static_batch import opaque_type, restrided, signature_of
from kitsune.errors import CaptureError
from kitsune.launches.pipeline import Planner
from kitsune.launches.plans import Planned
from kitsune.launches.timing_cache import TimingCache
from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import parameters_of

HALF = (torch.float16, torch.bfloat16)
MAX_PROGRAMS = 2  # of a model; each keeps the activations of a batch in memory of its own
NOTES = {
    "other_shape": "forwards of other shapes, or with other values of plain arguments, ran as given until frequent",
    "in_flight": "a forward before the backward of the last one of its shape ran as given",
    "differentiable": "forwards whose inputs require gradients ran uncaptured",
    "one_stream": "a batch of another shape runs on one stream: its launches could not be planned",
    "kept": "forwards ran uncaptured while the loop kept gradients of an earlier step",
    "keeps_no_cache": "captured forwards keep no cache for generation (past_key_values)",
}


def to_single(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF else leaf


def small_to_single(leaf: Any) -> Any:
    return leaf if stays_half(leaf) else to_single(leaf)


@dataclass(slots=True)
class ForwardProgram:
    """The forwards of one batch signature: `runs` that warm up, then what was captured."""

    runs: int = 0
    segments: Segments | None = None


class SegmentedForward:
    """A model's training forward by a plan: `forward` may be compiled, `plain` is the model as given.

    The first forwards of a batch signature are real and uncaptured; then forward and backward become two graphs.
    With `capture=False` nothing is ever captured and only contexts, layout and loss scaling apply. `step_contexts`
    are entered around the backward as well. `single_outputs` makes half-precision outputs fp32, as autocast itself does
    before a loss; with a `fused_loss`, large ones stay as they are for that loss to read. `sole_outputs` learns of them
    from a first forward of `plain`. `retain_graph` keeps
    activations to the end of the backward, so that there may be another. `refusal` says why nothing is captured any
    more; `counts` how the forwards ran. `streams_refusal` says why launches are not planned for several `streams`;
    `plan` is that of the last backward that was.
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
        forward_contexts: Sequence[Context] = (),
        step_contexts: Sequence[Context] = (),
        memory_format: torch.memory_format | None = None,
        scaler: LossScaler | None = None,
        single_outputs: bool = False,
        retain_graph: bool = False,
        streams: int = 1,
        pool_bytes: int | None = None,
        fused_loss: Loss | None = None,
        sole_outputs: SoleOutputs | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.capture = capture
        self.step_contexts = step_contexts
        self.contexts = [*step_contexts, *forward_contexts]
        self.memory_format = memory_format
        self.scaler = scaler
        self.single_outputs = single_outputs
        self.retain_graph = retain_graph
        self.streams = streams
        self.pool_bytes = pool_bytes
        self.fused_loss = fused_loss if single_outputs else None
        self.sole_outputs = sole_outputs
        self.streams_refusal = ""
        self.plan: Planned | None = None
        self.refusal: str | None = None
        self.counts: dict[str, int] = {}
        self._last: Segments | None = None
        self._forward = forward
        self._plain = plain
        self._programs = ProgramCache(MAX_PROGRAMS, ForwardProgram, lambda program: program.segments is not None)
        self._has_enclosed = False
        self._is_given_caches = False

    @property
    def is_settled(self) -> bool:
        return not self.capture or self.refusal is not None or any(one.segments for one in self._programs)

    @property
    def is_replayed(self) -> bool:
        """Whether the last forward was a replay; its backward is a replay too."""
        return self._last is not None

    def owner(self) -> Segments | None:
        """The segments in whose static tensors all gradients lie now, or None."""
        return self._last if self._last is not None and self._last.owns_gradients() else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._last = None
        if self.sole_outputs is not None and not self.sole_outputs.is_known:
            return self._eager("warm", self._plain, args, kwargs)
        try:
            key = signature_of((args, kwargs)), autocast_of(self.device.type)
            found = self._programs.find(key)
        except TypeError:  # an argument without a hash has no signature
            return self._eager("eager", self._forward, args, kwargs)
        program = self._without_stale(found)
        if program is not None and program.segments is not None:
            return self._replay(program.segments, args, kwargs)
        program = program or self._programs.admit(key)
        if program is None and self._programs.is_rare(key):
            return self._eager("other_shape", self._plain, args, kwargs)
        if program is None or not self.capture or self.refusal is not None:
            return self._eager("eager", self._forward, args, kwargs)
        if any(leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
            return self._eager("differentiable", self._forward, args, kwargs)
        if program.runs >= WARM_RUNS:
            return self._first_replay(program, args, kwargs)
        output = self._warm(program, args, kwargs)
        program.runs += 1
        return output

    def _without_stale(self, program: ForwardProgram | None) -> ForwardProgram | None:
        """The program; None where its graphs are stale, and then those of other signatures are dropped as well."""
        if program is None or program.segments is None:
            return program
        if program.segments.unchanged():
            if not program.segments.has_listeners:
                return program
            self.refusal = PARTIAL
        self._programs.clear()
        return None

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _warm(self, program: ForwardProgram, args: Any, kwargs: Any) -> Any:
        """A run before the capture. The last one finds out what the capture would fail at or leave behind."""
        if program.runs < WARM_RUNS - 1:  # compiling and autotuning synchronise with the device
            output = self._eager("warm", self._forward, args, kwargs)
            self._attributes = Attributes(self.model)
            return output
        self.refusal = self._attributes.why_replaced()
        if self.refusal is not None:
            return self._eager("eager", self._forward, args, kwargs)
        watched = WatchedRun("the forward", self.model, self.device, given=(args, kwargs))
        with watched.syncs:
            output = self._eager("warm", self._forward, args, kwargs)
        tensors = tensors_in(output)
        past = Past(tensors)
        self._listeners = Listeners([tensors[at] for at in past.sources()], in_backward=True)
        self.refusal = (
            watched.why_not_replayed()
            or why_not_joined(pytree.tree_leaves(output))
            or past.why_not_grad()
            or watched.why_not_ours(tensors, self._parameters(), "the model")
        )
        return output

    def _parameters(self) -> list[torch.Tensor]:
        """The model's; under `functional_call`, which replaces them, also the optimizer's."""
        own: list[torch.Tensor] = list(self.model.parameters())
        is_swapped = not all(each.is_leaf for each in own)
        return [*own, *parameters_of(self.optimizer)] if is_swapped else own

    def _first_replay(self, program: ForwardProgram, args: Any, kwargs: Any) -> Any:
        self.refusal = self._why_not_capturable((args, kwargs))
        if self.refusal is None:
            try:
                program.segments = self._segments(args, kwargs)
            except CaptureError as error:
                self.refusal = str(error)
        if program.segments is None:
            return self._eager("eager", self._forward, args, kwargs)
        if program.segments.keeps_no_cache:
            self._count("keeps_no_cache")
        return self._replay(program.segments, args, kwargs)

    def _why_not_capturable(self, arguments: Any) -> str | None:
        if self._is_given_caches:
            return "the loop passes caches that the model returns back to it"
        if self._listeners.are_there():
            return PARTIAL
        unheard = why_skipped(self.model)
        if unheard is not None:
            return unheard
        opaque = opaque_type(arguments)
        if opaque is not None:
            return f"the model is called with a {opaque}, whose tensors cannot be found"
        devices = {leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        others = sorted(str(device) for device in devices if device.type != self.device.type)
        return f"the model is called with a tensor on {others[0]}" if others else None

    def _segments(self, args: Any, kwargs: Any) -> Segments:
        # A pool for each signature: graphs that share one overwrite each other's activations.
        recorder = Recorder(self.device)
        planner = None
        if self.streams > 1 and not self.streams_refusal:
            planner = Planner(recorder, self.streams, self.pool_bytes, TimingCache.of_this_machine())
        segments = Segments(
            self.model,
            self.optimizer,
            self._in_contexts(self._forward, to_single if self.fused_loss is None else small_to_single),
            recorder,
            (args, kwargs),
            contexts=self.step_contexts,
            memory_format=self.memory_format,
            scaler=self.scaler,
            retain_graph=self.retain_graph,
            planner=planner,
            fused_loss=self.fused_loss,
        )
        if planner is not None:
            self._learn(planner)
        return segments

    def _learn(self, planner: Planner) -> None:
        """A shape that cannot be planned does not change the plan of another one."""
        if planner.plan is not None:
            self.plan = planner.plan
        elif self.plan is None:
            self.streams_refusal = planner.refusal
        else:
            self._count("one_stream")

    def _replay(self, segments: Segments, args: Any, kwargs: Any) -> Any:
        if segments.is_waiting:
            return self._eager("in_flight", self._plain, args, kwargs)
        if segments.gradients_are_kept():
            return self._eager("kept", self._plain, args, kwargs)
        self._count("captured")
        self._last = segments
        return segments(*args, **kwargs)

    def _eager(self, what: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._count(what)
        self._is_given_caches = self._is_given_caches or any(map(is_cache, (*args, *kwargs.values())))
        if self.memory_format is not None:
            args, kwargs = restrided((args, kwargs), self.memory_format)
        run = self._in_contexts(forward)
        if self.scaler is None and not self.step_contexts:
            return run(*args, **kwargs)
        before, self._has_enclosed = None if self._has_enclosed else tensors_there(), True
        return enclosed(run, self.model, args, kwargs, contexts=self.step_contexts, scaler=self.scaler, before=before)

    def _in_contexts(self, forward: Callable[..., Any], cast: Callable[[Any], Any] = to_single) -> Callable[..., Any]:
        if not (self.contexts or self.single_outputs):
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            sole = self.sole_outputs
            watched = None if sole is None or sole.is_known else sole.watch()
            with entered(self.contexts):
                output = forward(*args, **kwargs)
            if not self.single_outputs:
                return output
            given = pytree.tree_map(cast, output)
            if watched is not None:
                learn = watched.gave(output)
                del output
                learn()
            return given

        return run
