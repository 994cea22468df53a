"""Predicts the schedule that the knob `streams` would choose for a workload, without capturing or trying it."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.capture.step_body import Body, entered
from kitsune.capture.step_graph import StepGraph
from kitsune.device.backend import first_line, side_stream
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import SURPRISES, CaptureError, DeclinedError, UnfitError, WorkloadError
from kitsune.knobs import KNOBS, Choice
from kitsune.launches.model.recording import Recording
from kitsune.launches.plans import Planned, all_plans, fitting
from kitsune.plan import Plan
from kitsune.runtime.plan_application import Assembly
from kitsune.runtime.report import Report
from kitsune.techniques import Build, facts_of
from kitsune.timeline import ClassTime
from kitsune.update.optimizer_update import Update
from kitsune.workload import Workload, call_model, device_of, loss_of
from tuner.search.space import Space
from tuner.workloads.plain_step import plain_step

#: Knobs that are set here, whatever the plan says.
LOOKED_AT: Final = ("capture", "streams")
#: Knobs left out on a CPU: those of a GPU, and `compile`, whose code makes no launches that can be recorded there.
OF_A_GPU: Final = (*LOOKED_AT, "pool_bytes", "compile")
NO_CLASSES: Final = "no times by class of kernels: no memory to measure what the device can do"
UNSEEN: Final = "without compile, whose launches can be recorded on a GPU only"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """`plans`: for the launches of one step, the fastest first. `finest`: the fastest on several streams, even if it
    needs too much memory or more streams than were asked for. `classes`: the launches of `finest` by class of kernels.
    `report`: which choices were applied or declined."""

    plans: list[Planned]
    finest: Planned
    classes: tuple[ClassTime, ...]
    report: Report


def rehearse(workload: Workload, knobs: Mapping[str, Choice], streams: int) -> Rehearsal:
    """Runs a few steps with the choices, records one, and plans its launches for 1 to `streams` streams.

    The recording is verified against the step. Nothing is captured, and the schedules are not tried out. Weights and
    optimizer state are changed. Raises CaptureError when the launches cannot be recorded, WorkloadError when the step
    fails as given, DeclinedError when it fails because of a choice, UnfitError for lack of memory.
    """
    check_runs(workload)
    model, optimizer, device = workload.model, workload.optimizer, device_of(workload.model)
    chosen = Plan.by_hand(**recordable(knobs, device))
    assembly = Assembly(chosen, facts_of(model, optimizer, device), device, "eager")
    with contextlib.ExitStack() as undo:
        build = Build(model=model, optimizer=optimizer, device=device, forward=forward_of(workload), undo=undo)
        assembly.apply(build)
        check_plannable(assembly.report)
        if device.type != "cuda" and knobs.get("compile", "off") != "off":
            assembly.report.note(UNSEEN)
        try:
            recording = recorded(build, workload.batch, assembly.report)
            with side_stream(device), entered(build.step_contexts):  # launches are timed as they run in the step
                found = all_plans(recording, max(streams, 2))
                several = [plan for plan in found if plan.schedule.streams > 1]
                finest = min(several or found, key=predicted_us)
                classes = finest.class_times()
            asked = [plan for plan in found if plan.schedule.streams <= streams]
            if not classes:
                assembly.report.note(NO_CLASSES)
            return Rehearsal(
                sorted(fitting(asked, build.pool_bytes), key=predicted_us), finest, classes, assembly.report
            )
        except torch.OutOfMemoryError as error:
            raise UnfitError(
                f"out of memory, since a recorded step frees memory only at its end: {first_line(error)}"
            ) from error
        except RuntimeError as error:
            blamed = assembly.blamed(error)
            if blamed is None:
                raise CaptureError(f"the launches of this step cannot be recorded: {first_line(error)}") from error
            raise DeclinedError(*blamed) from error


def predicted_us(plan: Planned) -> float:
    return plan.schedule.makespan_us


def check_runs(workload: Workload) -> None:
    """Raises WorkloadError when the step fails in plain torch, so that no choice is blamed for it."""
    try:
        plain_step(workload, *workload.batch, update=False)
    except SURPRISES as error:
        raise WorkloadError(f"the step fails as given: {type(error).__name__}: {first_line(error)}") from error


def recordable(knobs: Mapping[str, Choice], device: torch.device) -> dict[str, Choice]:
    """The choices, changed so that the whole step is one graph; a compile mode with graphs of its own loses them.

    On a CPU nothing is captured or compiled, and the fused update replaces the others: those read the step counter on
    the host, which cannot be recorded.
    """
    if device.type != "cuda":
        return {**{name: choice for name, choice in knobs.items() if name not in OF_A_GPU}, "update": "fused"}
    several: dict[str, Choice] = {"capture": "step", "streams": max(map(int, KNOBS["streams"].choices))}
    return Space.of().repair({**knobs, **several}, keep="streams")


def check_plannable(report: Report) -> None:
    """Raises CaptureError when the launches of this step cannot be planned here."""
    for name in LOOKED_AT:
        if name in report.declined:
            raise CaptureError(f"the launches of this step cannot be planned here: {report.declined[name]}")


def recorded(build: Build, batch: tuple[Any, Any], report: Report) -> Recording:
    """The recording of one step. Raises CaptureError with the reason if there is none."""
    body = Body(
        build.model,
        build.forward,
        Update(build.optimizer, scaler=build.scaler),
        forward_contexts=build.forward_contexts,
        step_contexts=build.step_contexts,
        half_weights=build.half_weights,
    )
    graph = StepGraph(body, Recorder(build.device), build.device, build.memory_format)
    found = graph.recorded(batch)
    if found.recording is None:
        raise CaptureError(f"the launches of this step cannot be followed: {found.refusal}")
    if graph.update_outside:
        report.note(f"the optimizer's update is not among the launches: {graph.update_outside}")
    return found.recording


def forward_of(workload: Workload) -> Any:
    def forward(x: Any, y: Any) -> torch.Tensor:
        return loss_of(call_model(workload.model, x), workload.loss_fn, y)

    return forward
