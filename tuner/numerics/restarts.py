"""Takes single steps from a candidate's current state: the reference in float64, or eager as a yardstick."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from kitsune.device.tf32 import full_precision
from kitsune.knobs import dtype_choices
from kitsune.workload import Workload
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.reference import NOT_CONVERTIBLE, dtypes_of_references, reference_step
from tuner.numerics.tensor_errors import StepResult
from tuner.numerics.trace_errors import ModelState
from tuner.numerics.training_trace import load_state, perturb

Step = Callable[[Any, Any], torch.Tensor]


def step_result(workload: Workload, loss: torch.Tensor, before: ModelState) -> StepResult:
    """The result of a step that started from `before`. The gradients are the live ones, not copies."""
    buffers = list(zip(workload.model.buffers(), before.buffers, strict=True))
    return StepResult(
        loss=float(loss),
        gradients=[None if each.grad is None else each.grad.detach() for each in workload.model.parameters()],
        buffers=[after.detach().double() - value.double() for after, value in buffers if after.is_floating_point()],
        counters=[after.detach() for after, _ in buffers if not after.is_floating_point()],
    )


class StepFromState:
    """A workload and its step, set to a given state before each run."""

    def __init__(self, workload: Workload, step: Step) -> None:
        self._workload = workload
        self._step = step

    def run(self, state: ModelState, batch: Any, noise: int | None = None) -> StepResult:
        """One step from that state. With `noise`, a seed, the state is changed by a few units in the last place."""
        load_state(self._workload, state)
        if noise is not None:
            perturb(self._workload, noise)
        return step_result(self._workload, self._step(*batch), state)


def reference_of(job: Job, *, randomness: bool, double: bool) -> tuple[StepFromState, str]:
    """The step as given in float64, or without TF32 in fp32 if float64 is not asked for or fails; and a note."""
    workload = fresh_workload(job, randomness=randomness)
    *wider, (_, note) = dtypes_of_references(workload.model.parameters(), double=double)
    for dtype, wider_note in wider:
        with contextlib.suppress(*NOT_CONVERTIBLE):
            return _reference(workload, dtype), wider_note
        workload = fresh_workload(job, randomness=randomness)  # the other one is converted
    return _reference(workload, None), note


def _reference(workload: Workload, dtype: torch.dtype | None) -> StepFromState:
    """In another dtype it runs once, so that a model which cannot run in it raises here."""
    plain = reference_step(workload, dtype)

    def step(x: Any, y: Any) -> torch.Tensor:
        with full_precision():
            return plain(x, y, False)

    if dtype is not None:
        step(*workload.batch)
    return StepFromState(workload, step)


def eager_arm(job: Job, *, randomness: bool) -> LiveArm:
    """The step as given with the candidate's precision and nothing else."""
    knobs = dtype_choices(job.arms[-1].knobs)
    return LiveArm(job, ArmSpec(name="yardstick", knobs=knobs), randomness=randomness)


def yardstick_step(arm: LiveArm) -> StepFromState:
    """An arm as a yardstick. Its own updates have no effect: its rates are 0, and its state is set before each step."""
    Rates(arm.workload.optimizer).scale(0.0)
    return StepFromState(arm.workload, arm)
