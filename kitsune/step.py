"""TrainStep: a model, its loss and its optimizer run as one training step, by a plan."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from kitsune.assembly import Assembly, OnDecline
from kitsune.device import Recorder, first_line
from kitsune.engine.body import Body
from kitsune.engine.cudagraph import EagerStep, StepGraph
from kitsune.engine.dispatch import SegmentedForward
from kitsune.engine.snapshot import Snapshot
from kitsune.engine.static import signature_of
from kitsune.engine.update import Update
from kitsune.engine.updategraph import UpdateGraph
from kitsune.errors import CaptureError, WorkloadError
from kitsune.plan import Plan
from kitsune.report import Report
from kitsune.techniques import Build, facts_of
from kitsune.workload import LossFn, call_model, loss_of

OTHER_SHAPE_PATIENCE = 8  # batches of another shape run uncompiled this often before they get a program of their own
MAX_PROGRAMS = 4

Program = EagerStep | StepGraph


class TrainStep:
    """One whole training step: zero_grad, forward, loss, backward, clipping, loss scaling and update.

        step = kitsune.TrainStep(model, loss_fn, optimizer, plan=plan)
        for x, y in loader:
            loss = step(x, y)

    The first calls are real steps that compile, warm up and capture; `is_settled` tells when that is over. Learning
    rates are read at every step. What cannot be applied is in `report.declined` with its reason, or raises
    DeclinedError with `on_decline="raise"`. `close()` undoes every change to model, optimizer and global flags.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer,
        plan: Plan | None = None,
        *,
        clip_grad_norm: float | None = None,
        on_decline: OnDecline = "eager",
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.plan = plan
        self.clip_grad_norm = clip_grad_norm
        self.device = device_of(model)
        self._assembly = Assembly(plan, facts_of(model, optimizer, self.device), self.device, on_decline)
        self._undo = contextlib.ExitStack()
        self._assemble()

    @property
    def report(self) -> Report:
        return self._assembly.report

    @property
    def is_settled(self) -> bool:
        """True once nothing more will be compiled or captured for the batch signatures seen so far."""
        waiting = self._segmented is not None and not self._segmented.is_settled
        return not waiting and bool(self._programs) and all(p.is_settled for p in self._programs.values())

    def __call__(self, x: Any, y: Any = None) -> torch.Tensor:
        """Runs one step on a batch, on any device, and returns the detached loss, a scalar on the model's device."""
        batch = (x, y)
        key = signature_of(batch), self.model.training
        program = self._program(key)
        if isinstance(program, StepGraph) and program.is_stale():
            self._assembly.check(facts_of(self.model, self.optimizer, self.device))
            self._assemble()
            program = self._program(key)
        return program(batch) if self.is_settled else self._settle(program, batch)

    def close(self) -> None:
        """Gives model, optimizer and flags back as they were; the step must not be called afterwards."""
        self._programs.clear()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _assemble(self) -> None:
        """Builds the step anew from what is left of the plan."""
        self._undo.close()
        self._programs: dict[Any, Program] = {}
        self._other_shapes: dict[Any, int] = {}
        segments = self._assembly.knobs.get("capture") == "segments"
        self._build = build = Build(
            model=self.model,
            optimizer=self.optimizer,
            device=self.device,
            forward=self._call if segments else self._loss,
            undo=self._undo,
        )
        self._assembly.apply(build)
        self._recorder = Recorder(self.device)
        update = Update(self.optimizer, scaler=build.scaler, clip_grad_norm=self.clip_grad_norm)
        self._segmented: SegmentedForward | None = None
        self._plain = self._body(self._loss, update)
        self._tuned = self._segments(update) if segments else self._body(build.forward, update)

    def _body(self, forward: Any, update: Update, finish: Callable[[], None] | None = None) -> Body:
        return Body(
            self.model,
            forward,
            update,
            forward_contexts=self._build.forward_contexts,
            step_contexts=self._build.step_contexts,
            finish=finish,
        )

    def _segments(self, update: Update) -> Body:
        """Forward, backward and update as three graphs; contexts and loss scaling are the body's."""
        build, model, optimizer = self._build, self.model, self.optimizer
        segmented = SegmentedForward(
            model, optimizer, build.forward, self._call, self.device, capture=True, memory_format=build.memory_format
        )
        graph = UpdateGraph(update, self._recorder)
        self._segmented = segmented
        return self._body(
            lambda x, y: loss_of(call_model(segmented, x), self.loss_fn, y), update, lambda: graph(segmented.owner())
        )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _loss(self, x: Any, y: Any) -> torch.Tensor:
        return loss_of(call_model(self.model, x), self.loss_fn, y)

    def _program(self, key: Any) -> Program:
        program = self._programs.get(key)
        if program is not None:
            return program
        if self._programs:
            seen = self._other_shapes[key] = self._other_shapes.get(key, 0) + 1
            if seen <= OTHER_SHAPE_PATIENCE or len(self._programs) >= MAX_PROGRAMS:
                self.report.note("batches of other shapes run uncompiled and uncaptured")
                return EagerStep(self._plain, self.device, self._build.memory_format)
        if self._build.capture == "step":
            program = StepGraph(self._tuned, self._recorder, self.device, self._build.memory_format)
        else:
            program = EagerStep(self._tuned, self.device, self._build.memory_format)
        self._programs[key] = program
        return program

    def _settle(self, program: Program, batch: tuple[Any, Any]) -> torch.Tensor:
        """A call that may compile or capture; when a technique fails in it, the same step without that technique."""
        snapshot = Snapshot(self.model, self.device)
        try:
            loss = program(batch)
        except (RuntimeError, CaptureError) as error:
            knob = self._assembly.culprit(error)
            if knob is None:
                raise
            reason = first_line(error)
        else:
            self._learn_from(program)
            return loss
        snapshot.restore()
        self._assembly.decline(knob, reason)
        self._assemble()
        return self(*batch)

    def _learn_from(self, program: Program) -> None:
        refusal = self._segmented.refusal if self._segmented is not None else None
        if isinstance(program, StepGraph):
            refusal = program.refusal
            self.report.peak_bytes = max(self.report.peak_bytes, program.peak_bytes)
            if program.update_outside:
                self.report.note(f"the optimizer's update runs outside of the graph: {program.update_outside}")
        if refusal:
            self._assembly.decline("capture", refusal)
            self._assemble()


def device_of(model: torch.nn.Module) -> torch.device:
    """The one device of a model. Raises WorkloadError when it has no parameters or spans several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise WorkloadError(f"the model's parameters must be on one device; found {found}")
    return devices.pop()
