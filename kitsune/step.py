"""TrainStep: a model, its loss and its optimizer run as one training step, by a plan."""

import contextlib
from collections.abc import Iterable
from numbers import Real
from types import TracebackType
from typing import Any, Self

import torch

from kitsune.autograd.hooks import Hooks
from kitsune.capture.forward_dispatch import SegmentedForward, autocast_of
from kitsune.capture.micro_batches import micro_batches
from kitsune.capture.rollback import Snapshot, Sums
from kitsune.capture.step_body import Body, entered
from kitsune.capture.step_graph import EagerStep, StepGraph
from kitsune.client.remote_tuning import Auto, plan_of_step
from kitsune.device.backend import first_line
from kitsune.device.cuda_graph import Recorder
from kitsune.device.static_batch import signature_unless_opaque
from kitsune.errors import DeclinedError, SettingsError
from kitsune.memory.prefetch import Batch, Prefetcher
from kitsune.plan import Plan
from kitsune.runtime.plan_application import Assembly, OnDecline, show_plan
from kitsune.runtime.report import Report
from kitsune.techniques import Build, facts_of
from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import Update
from kitsune.update.update_graph import UpdateGraph
from kitsune.workload import LossFn, call_model, check_optimizer, check_types, device_of, loss_of

OTHER_SHAPE_PATIENCE = 8  # batches of another shape run uncompiled this often before they get a program of their own
MAX_PROGRAMS = 4
MAX_OTHER_SHAPES = 256

NO_LOADER = "prefetch waits for a loader: for x, y in step.batches(loader)"
HALF_UPDATED = "some parameters were updated by then, so the step is not repeated: the next one runs without it"

Program = EagerStep | StepGraph


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
        self._assembly = self._planned()
        self._undo = contextlib.ExitStack()
        self._scaler: LossScaler | None = None
        self._has_loader = False
        self._assemble()

    @property
    def report(self) -> Report:
        """What was applied and what was declined, and how launches were planned."""
        self._assembly.show_fusion()
        report = self._assembly.report
        report.scaler = None if self._build.scaler is None else self._build.scaler.statistics
        if self._update_graph is not None and self._update_graph.refusal:
            report.note(f"the optimizer's update runs outside of the graphs: {self._update_graph.refusal}")
        if self._segmented is not None:
            show_plan(report, self._segmented.plan, "backward: ")
        else:
            plans = [program.plan for program in self._programs.values() if isinstance(program, StepGraph)]
            show_plan(report, next(filter(None, reversed(plans)), None))
        return report

    @property
    def is_settled(self) -> bool:
        """True once nothing more will be compiled or captured for batches like the last one that came by the plan."""
        waiting = self._segmented is not None and not self._segmented.is_settled
        return not waiting and self._current is not None and self._current.is_settled

    def __call__(self, x: Any, y: Any = None) -> torch.Tensor:
        """Runs one step on a batch, on any device, and returns the detached loss, a scalar on the model's device."""
        batch = (x, y)
        if self._is_seeking:
            self._seek(batch)
        program = self._program(batch)
        if program.is_stale() or len(self.optimizer.param_groups) != self._groups:
            self._undo.close()  # first, lest the plan's own flags be taken for the user's
            self._assembly.check(facts_of(self.model, self.optimizer, self.device))
            self._assemble()
            program = self._program(batch)
        program.refresh()
        return program(batch) if self.is_settled else self._settle(program, batch)

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """The batches of a loader, on the device ahead of their step as the plan's `prefetch` says.

        Without it, and before `plan="auto"` has found a plan, the loader itself.
        """
        ahead = self._build.prefetch
        if not ahead:
            return loader
        self._has_loader = True
        self._tell_prefetch(ahead)
        return Prefetcher(self.device, ahead).wrap(loader)

    def close(self) -> None:
        """Gives model, optimizer and flags back as they were; the step must not be called afterwards."""
        self._programs.clear()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _planned(self) -> Assembly:
        facts = facts_of(self.model, self.optimizer, self.device)
        return Assembly(self.plan, facts, self.device, self._on_decline)

    def _seek(self, batch: tuple[Any, Any]) -> None:
        """Asks for the plan of this very step, once."""
        self._is_seeking = False
        part, _ = next(micro_batches(batch, self.accumulation_steps))
        found = plan_of_step(self.model, self.loss_fn, self.optimizer, part)
        if found.plan is not None:
            self.plan = found.plan
            self._assembly = self._planned()
            self._assemble()
        self._assembly.report.note(f"plan='auto': {found.reason}")

    def _assemble(self) -> None:
        """Builds the step anew from what is left of the plan."""
        self._undo.close()
        self._programs: dict[Any, Program] = {}
        self._current: Program | None = None
        self._other_shapes: dict[Any, int] = {}
        self._groups = len(self.optimizer.param_groups)  # one that is added has none of the plan's flags
        segments = self._assembly.knobs.get("capture") == "segments"
        self._build = build = Build(
            model=self.model,
            optimizer=self.optimizer,
            device=self.device,
            forward=self._call if segments else self._loss,
            undo=self._undo,
        )
        self._assembly.apply(build)
        if build.prefetch:
            self._tell_prefetch(build.prefetch)
        if build.scaler is not None:  # the scale that training has found outlives a new assembly
            build.scaler = self._scaler = self._scaler or build.scaler
        self._recorder = Recorder(self.device)
        self._segmented: SegmentedForward | None = None
        self._update_graph: UpdateGraph | None = None
        self._plain = self._body(self._loss)
        self._tuned = self._segments() if segments else self._body(build.forward)

    def _tell_prefetch(self, ahead: int) -> None:
        """It is applied by whoever gives their loader to `batches`."""
        report = self._assembly.report
        if self._has_loader:
            report.applied["prefetch"] = ahead
            report.notes = [note for note in report.notes if note != NO_LOADER]
        else:
            del report.applied["prefetch"]
            report.note(NO_LOADER)

    def _update(self) -> Update:
        return Update(self.optimizer, scaler=self._build.scaler, clip_grad_norm=self.clip_grad_norm)

    def _body(self, forward: Any) -> Body:
        return Body(
            self.model,
            forward,
            self._update(),
            forward_contexts=self._build.forward_contexts,
            step_contexts=self._build.step_contexts,
            accumulation_steps=self.accumulation_steps,
            loss_fn=self.loss_fn,
        )

    def _segments(self) -> Body:
        """Forward, backward and update as three graphs. Loss scaling is the body's.

        Forward contexts are entered around forward and loss apart: a backward captured within would inherit them.
        """
        build, model, optimizer, update = self._build, self.model, self.optimizer, self._update()
        segmented = SegmentedForward(
            model,
            optimizer,
            build.forward,
            self._call,
            self.device,
            capture=True,
            forward_contexts=build.forward_contexts,
            memory_format=build.memory_format,
            streams=build.streams,
            pool_bytes=build.pool_bytes,
        )
        graph = UpdateGraph(update, self._recorder)
        self._segmented, self._update_graph = segmented, graph

        def forward(x: Any, y: Any) -> torch.Tensor:
            output = call_model(segmented, x)
            with entered(build.forward_contexts):
                return loss_of(output, self.loss_fn, y)

        def finish() -> None:
            graph(segmented.owner())

        return Body(
            model,
            forward,
            update,
            step_contexts=build.step_contexts,
            finish=finish,
            accumulation_steps=self.accumulation_steps,
        )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _loss(self, x: Any, y: Any) -> torch.Tensor:
        return loss_of(call_model(self.model, x), self.loss_fn, y)

    def _program(self, batch: tuple[Any, Any]) -> Program:
        key = self._key_of(batch)
        program = self._programs.get(key)
        if program is not None:
            self._current = program
            return program
        if self._programs and not self._deserves_program(key):
            if self._assembly.knobs.keys() & {"compile", "capture"}:
                self._assembly.report.note(
                    "batches of other shapes, or with other values of what is no tensor, run uncompiled and uncaptured"
                )
            return EagerStep(self._plain, self.device, self._build.memory_format)
        self._programs[key] = self._current = program = self._new_program()
        return program

    def _key_of(self, batch: tuple[Any, Any]) -> Any:
        # Objects that may hide tensors compare by identity, or not at all: None is the signature of them all.
        return signature_unless_opaque(batch), self.model.training, autocast_of(self.device.type)

    def _deserves_program(self, key: Any) -> bool:
        if len(self._other_shapes) >= MAX_OTHER_SHAPES:
            self._other_shapes.clear()
        seen = self._other_shapes[key] = self._other_shapes.get(key, 0) + 1
        return seen > OTHER_SHAPE_PATIENCE and len(self._programs) < MAX_PROGRAMS

    def _new_program(self) -> Program:
        build = self._build
        if build.capture == "step":
            # A body of its own: each graph reads the learning-rate tensors that it was captured with.
            body = self._body(build.forward)
            how = build.memory_format, build.streams, build.pool_bytes
            return StepGraph(body, self._recorder, self.device, *how)
        hooks = Hooks(self.model) if "compile" in self._assembly.knobs else None
        return EagerStep(self._tuned, self.device, build.memory_format, hooks)

    def _settle(self, program: Program, batch: tuple[Any, Any]) -> torch.Tensor:
        """A call that may compile or capture; when a technique fails in it, the same step without that technique."""
        snapshot = Snapshot(self.model, self.device)
        sums = Sums(self.optimizer) if "update" in self._assembly.knobs else None
        try:
            loss = program(batch)
        except Exception as error:  # those of Triton derive from nothing else; what no technique owns up to goes on
            knob = self._assembly.culprit(error)
            if knob is None:
                self._forget(program)
                raise
            reason = first_line(error)
            if knob == "update" and sums is not None and sums.changed():
                self._assembly.go_on_without(knob, reason, self._assemble)
                raise DeclinedError(knob, f"{reason}; {HALF_UPDATED}") from error
        else:
            self._learn_from(program)
            return loss
        snapshot.restore()
        with self._assembly.unless_blameless(self._assemble):
            self._assembly.go_on_without(knob, reason, self._assemble)
            return self(*batch)

    def _forget(self, program: Program) -> None:
        """What failed in its first call is not waited for."""
        self._programs = {key: one for key, one in self._programs.items() if one is not program or one.calls}
        if not program.calls:
            self._current = None

    def _learn_from(self, program: Program) -> None:
        refusal, streams_refusal = None, ""
        if self._segmented is not None:
            refusal, streams_refusal = self._segmented.refusal, self._segmented.streams_refusal
        if isinstance(program, StepGraph):
            refusal, streams_refusal = program.refusal, program.streams_refusal
            report = self._assembly.report
            report.peak_bytes = max(report.peak_bytes, program.peak_bytes)
            if program.update_outside:
                report.note(f"the optimizer's update runs outside of the graph: {program.update_outside}")
        if refusal:
            self._assembly.go_on_without("capture", refusal, self._assemble)
        elif streams_refusal and self._build.streams > 1:
            self._one_stream(streams_refusal)

    def _one_stream(self, reason: str) -> None:
        """The programs go on as they are: each that was refused captures its step plainly next time."""
        self._build.streams = 1
        self._assembly.decline("streams", reason)


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
