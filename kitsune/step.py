"""TrainStep: a model, its loss and its optimizer run as one training step, by a plan."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any, Self

import torch

from kitsune.autograd.half_weights import HalfWeights
from kitsune.autograd.hooks import Hooks
from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.capture.guards import StepGuards
from kitsune.capture.micro_batches import micro_batches
from kitsune.capture.program_cache import ProgramCache
from kitsune.capture.step_body import Body, entered
from kitsune.capture.step_graph import EagerStep, StepGraph
from kitsune.client.remote_tuning import Auto, plan_of_step
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import SettingsError
from kitsune.memory.prefetch import Batch, Prefetcher
from kitsune.open_masks import with_open_masks, with_tensors
from kitsune.plan import Plan
from kitsune.runtime.applied_plan import AppliedPlan
from kitsune.runtime.plan_application import Assembly, OnDecline
from kitsune.runtime.report import Report
from kitsune.techniques import Build, facts_of
from kitsune.update.optimizer_update import Update
from kitsune.update.update_graph import UpdateGraph
from kitsune.workload import LossFn, as_arguments, call_model, check_optimizer, check_types, device_of, loss_of

Program = EagerStep | StepGraph

MAX_PROGRAMS = 4  # of a step; the drop-in has two
OTHER_BATCHES = (
    "batches of other shapes, or with other values of what is no tensor, run uncompiled and uncaptured until frequent"
)
UPDATE_OUTSIDE = "the optimizer's update runs outside of"


class TrainStep:
    """One whole training step: zero_grad, forward, loss, backward, clipping, loss scaling and update.

        step = kitsune.TrainStep(model, loss_fn, optimizer, plan=plan)
        for x, y in loader:
            loss = step(x, y)

    The first calls are real steps that compile, warm up and capture; `is_settled` tells when that is over. Learning
    rates are read at every step. `accumulation_steps=n` runs forward and backward on n parts of the batch, split along
    its first dimension, before the one update: the memory of a part, and for a loss that is a mean over rows the
    gradients of the whole. They stay in `p.grad` until the next captured step overwrites them: copy what you keep.
    `clip_grad_norm` is the norm to which all gradients together are clipped, those of the parameters that the optimizer
    holds; gradients of others are cleared as well before each step. `plan="auto"` asks a server (see
    `kitsune.fetch_plan`) at the first call, which knows the batch, and trains plain when there is no plan.
    What cannot be applied is in `report.declined` with its reason, or raises DeclinedError with
    `on_decline="raise"`. `close()` undoes every change to model, optimizer and flags.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer,
        plan: Plan | Auto | None = None,
        *,
        clip_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        on_decline: OnDecline = "eager",
    ) -> None:
        check_arguments(model, loss_fn, optimizer, plan, clip_grad_norm, accumulation_steps)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.plan = None if isinstance(plan, str) else plan
        self._is_seeking = isinstance(plan, str)
        self._on_decline: OnDecline = on_decline
        self.clip_grad_norm = clip_grad_norm
        self.accumulation_steps = accumulation_steps
        self.device = device_of(model)
        self._has_loader = False
        self._programs: ProgramCache[Program] = ProgramCache(MAX_PROGRAMS, self._new_program)
        self._apply()

    def _apply(self) -> None:
        facts = facts_of(self.model, self.optimizer, self.device)
        assembly = Assembly(self.plan, facts, self.device, self._on_decline)
        self._applied = AppliedPlan(assembly, self.model, self.optimizer, begin=self._begin, finish=self._finish)
        self._applied.apply()

    @property
    def report(self) -> Report:
        """What was applied and what was declined, and how launches were planned."""
        if self._segments is None:
            plans = [program.plan for program in self._programs if isinstance(program, StepGraph)]
            return self._applied.report(next(filter(None, reversed(plans)), None))
        refusal = self._segments.update.refusal
        notes = [f"{UPDATE_OUTSIDE} the graphs: {refusal}"] if refusal else []
        return self._applied.report(self._segments.forward.plan, "backward: ", notes)

    @property
    def is_settled(self) -> bool:
        """True once nothing more will be compiled or captured for batches like the last one that a program has run."""
        return self._programs.current is not None and self._programs.current.is_settled

    def __call__(self, x: Any, y: Any = None) -> torch.Tensor:
        """Runs one step on a batch, on any device, and returns the detached loss, a scalar on the model's device."""
        x = as_arguments(x)
        batch = (with_open_masks(x) if self._applied.build.asks_for_masks else x, y)
        program = self._guards.check(batch)
        if program is not None:
            return program(batch)
        program = self._prepare(batch)
        return program(batch) if self.is_settled else self._settle(program, batch)

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """The batches of a loader, on the device ahead of their step as the plan's `prefetch` says.

        Without it, and before `plan="auto"` has found a plan, the loader itself.
        """
        build = self._applied.build
        if not build.prefetch:
            return loader
        self._has_loader = True
        build.waiting.clear()
        return Prefetcher(self.device, build.prefetch).wrap(loader)

    def close(self) -> None:
        """Gives model, optimizer and flags back as they were; the step must not be called afterwards."""
        self._programs.clear()
        self._applied.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _prepare(self, batch: tuple[Any, Any]) -> Program:
        """For a batch that no program can run right away: its program, a new one, or the plain step.

        The plain step runs while batches of this signature are rare, and when there are MAX_PROGRAMS programs.
        """
        if self._is_seeking:
            self._seek(batch)
        if self._guards.is_stale(batch):
            self._applied.reapply()
        program = self._guards.program_of(batch)
        if program is not None:
            return program
        build = self._applied.build
        if build.is_specialised:
            self._applied.assembly.report.note(OTHER_BATCHES)
        return EagerStep(self._plain, self.device, build.memory_format)

    def _settle(self, program: Program, batch: tuple[Any, Any]) -> torch.Tensor:
        """A step of a program that may still compile or capture, and fail in that."""
        return self._applied.run(
            lambda: self._first(program, batch),
            again=lambda: self(*batch),
            rollback=self._applied.rollback(repeats_update=True),
            learn=lambda: self._learn_from(program),
        )

    def _first(self, program: Program, batch: tuple[Any, Any]) -> torch.Tensor:
        try:
            return program(batch)
        except Exception:
            if not program.calls:  # what failed in its first call is not waited for
                self._programs.forget(program)
            raise

    def _learn_from(self, program: Program) -> None:
        source: StepGraph | SegmentedForward | None = None
        if isinstance(program, StepGraph):
            source = program
            report = self._applied.assembly.report
            report.peak_bytes = max(report.peak_bytes, program.peak_bytes)
            if program.update_outside:
                report.note(f"{UPDATE_OUTSIDE} the graph: {program.update_outside}")
        elif self._segments is not None:
            source = self._segments.forward
        if source is not None:
            self._applied.heed(source.refusal, source.streams_refusal)

    def _seek(self, batch: tuple[Any, Any]) -> None:
        """Asks for the plan of this very step, once."""
        self._is_seeking = False
        part, _ = next(micro_batches(batch, self.accumulation_steps))
        found = plan_of_step(self.model, self.loss_fn, self.optimizer, part)
        if found.plan is not None:
            self.plan = found.plan
            self._applied.undo()
            self._apply()
        self._applied.assembly.report.note(f"plan='auto': {found.reason}")

    def _begin(self, undo: contextlib.ExitStack) -> Build:
        self._programs.clear()  # first: whatever fails from here on, no program of the plan before is run again
        forward = self._call if self._applied.assembly.splits_loss() else self._loss
        return Build(model=self.model, optimizer=self.optimizer, device=self.device, forward=forward, undo=undo)

    def _finish(self, build: Build) -> None:
        """Prepares what the programs of the build are made of."""
        if self._has_loader:
            build.waiting.clear()
        self._recorder = Recorder(self.device)
        self._plain = self._body(self._loss, None)
        self._segments = self._segmented(build) if build.capture == "segments" else None
        self._eager = self._body(build.forward, build.half_weights) if self._segments is None else self._segments.body
        self._guards = StepGuards(self._programs, self.model, self.device, self._applied.has_other_groups)

    def _new_program(self) -> Program:
        build = self._applied.build
        if build.capture == "step":
            # A body of its own: each graph reads the learning-rate tensors that it was captured with.
            how = build.memory_format, build.streams, build.pool_bytes
            body = self._body(build.forward, build.half_weights)
            return StepGraph(body, self._recorder, self.device, *how)
        hooks = Hooks(self.model) if build.hides_hooks else None
        forward = None if self._segments is None else self._segments.forward
        return EagerStep(self._eager, self.device, build.memory_format, hooks, forward)

    def _update(self, *, clips_apart: bool = False) -> Update:
        scaler = self._applied.build.scaler
        return Update(self.optimizer, scaler=scaler, clip_grad_norm=self.clip_grad_norm, clips_apart=clips_apart)

    def _body(self, forward: Any, half_weights: HalfWeights | None) -> Body:
        build = self._applied.build
        return Body(
            self.model,
            forward,
            self._update(),
            forward_contexts=build.forward_contexts,
            step_contexts=build.step_contexts,
            accumulation_steps=self.accumulation_steps * build.parts,
            loss_fn=self.loss_fn,
            half_weights=half_weights,
        )

    def _segmented(self, build: Build) -> "SegmentedStep":
        """Forward, backward and update as three graphs. Loss scaling is the body's.

        Forward contexts are entered around forward and loss apart: a backward captured within would inherit them.
        """
        segmented = SegmentedForward(
            self.model,
            self.optimizer,
            build.forward,
            self._call,
            self.device,
            capture=True,
            forward_contexts=build.forward_contexts,
            memory_format=build.memory_format,
            streams=build.streams,
            pool_bytes=build.pool_bytes,
        )
        update = self._update(clips_apart=True)
        graph = UpdateGraph(update, self._recorder)

        def forward(x: Any, y: Any) -> torch.Tensor:
            output = call_model(segmented, x)
            with entered(build.forward_contexts):
                return loss_of(output, self.loss_fn, y)

        def finish() -> None:
            graph(segmented.owner())

        body = Body(
            self.model,
            forward,
            update,
            step_contexts=build.step_contexts,
            finish=finish,
            accumulation_steps=self.accumulation_steps * build.parts,
        )
        return SegmentedStep(segmented, graph, body)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **with_tensors(kwargs))

    def _loss(self, x: Any, y: Any) -> torch.Tensor:
        return loss_of(call_model(self._call, x), self.loss_fn, y)


@dataclass(frozen=True, slots=True)
class SegmentedStep:
    """A step as three graphs."""

    forward: SegmentedForward
    update: UpdateGraph
    body: Body


def check_arguments(
    model: Any, loss_fn: Any, optimizer: Any, plan: Any, clip_grad_norm: Any, accumulation_steps: Any
) -> None:
    """Raises WorkloadError or SettingsError for what cannot be meant."""
    check_types(model, loss_fn, optimizer)
    check_optimizer(model, optimizer)
    if plan is not None and plan != "auto" and not isinstance(plan, Plan):
        raise SettingsError(f"plan is a {type(plan).__name__}; use kitsune.Plan.load(PATH), or 'auto' to ask a server")
    if clip_grad_norm is not None and not (isinstance(clip_grad_norm, Real) and float(clip_grad_norm) > 0):
        raise SettingsError(f"clip_grad_norm is {clip_grad_norm!r}; it must be a number greater than 0")
    if not (isinstance(accumulation_steps, int) and accumulation_steps > 0):
        raise SettingsError(f"accumulation_steps is {accumulation_steps!r}; it must be an integer greater than 0")
