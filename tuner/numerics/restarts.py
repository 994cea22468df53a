"""Takes single steps from a candidate's current state: the reference in float64, or eager as a yardstick."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kitsune.device.tf32 import full_precision
from kitsune.knobs import dtype_choices
from kitsune.workload import Workload
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.tensor_errors import StepResult
from tuner.numerics.training_trace import PERTURBATION, cloned
from tuner.workloads.batches import doubled
from tuner.workloads.plain_step import plain_step

Step = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelState:
    """Copies of a model's parameters and buffers at one moment."""

    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


def model_state(workload: Workload) -> ModelState:
    return ModelState(
        [cloned(each) for each in workload.model.parameters()], [cloned(each) for each in workload.model.buffers()]
    )


def set_state(workload: Workload, state: ModelState) -> None:
    """Copies in place, in the workload's own dtypes: a captured graph reads the tensors that it was captured with."""
    with torch.no_grad():
        for parameter, value in zip(workload.model.parameters(), state.parameters, strict=True):
            parameter.copy_(value)
        for buffer, value in zip(workload.model.buffers(), state.buffers, strict=True):
            buffer.copy_(value)


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

    def __init__(self, workload: Workload, step: Step, device: torch.device) -> None:
        self._workload = workload
        self._step = step
        self._device = device

    def run(self, state: ModelState, batch: Any, noise: int | None = None) -> StepResult:
        """One step from that state. With `noise`, a seed, the state is changed by a few units in the last place."""
        set_state(self._workload, state)
        if noise is not None:
            self._perturb(noise)
        return step_result(self._workload, self._step(*batch), state)

    def _perturb(self, seed: int) -> None:
        generator = torch.Generator(self._device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self._workload.model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator, device=self._device)
                    parameter.mul_(1 + PERTURBATION * noise.to(parameter.dtype))


def reference_of(job: Job, device: torch.device, *, randomness: bool, double: bool) -> tuple[StepFromState, str]:
    """The step as given in float64, or in fp32 without TF32 if float64 is not asked for or fails; and a note."""
    if double:
        # A model with a hard-coded dtype may fail in float64 with any of these errors.
        with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
            return _double_reference(job, device, randomness=randomness), ""
    workload = fresh_workload(job, randomness=randomness)

    def step(x: Any, y: Any) -> torch.Tensor:
        with full_precision():
            return plain_step(workload, x, y, update=False)

    return StepFromState(workload, step, device), "the reference is fp32"


def _double_reference(job: Job, device: torch.device, *, randomness: bool) -> StepFromState:
    workload = fresh_workload(job, randomness=randomness)
    workload.model.double()
    if isinstance(workload.loss_fn, torch.nn.Module):
        workload.loss_fn.double()

    def step(x: Any, y: Any) -> torch.Tensor:
        return plain_step(workload, *doubled((x, y)), update=False)

    step(*workload.batch)
    return StepFromState(workload, step, device)


def eager_arm(job: Job, *, randomness: bool) -> LiveArm:
    """The step as given with the candidate's precision and nothing else."""
    knobs = dtype_choices(job.arms[-1].knobs)
    return LiveArm(job, ArmSpec(name="yardstick", knobs=knobs), randomness=randomness)


def yardstick_step(arm: LiveArm, device: torch.device) -> StepFromState:
    """An arm as a yardstick. Its own updates have no effect: its rates are 0, and its state is set before each step."""
    Rates(arm.workload.optimizer).scale(0.0)
    return StepFromState(arm.workload, arm, device)
