"""The numerics gate for steps whose random numbers cannot be switched off: it compares means over many steps.

Every run stays at the same weights (learning rate 0) and batch, and draws other random numbers in each step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, variance

import torch

from kitsune.device.backend import pick_device
from kitsune.device.tf32 import full_precision
from kitsune.plan import Numerics
from kitsune.techniques.technique import Tolerance
from kitsune.workload import Workload
from tuner.building.arms import LiveArm, Rates, fresh_workload
from tuner.measuring.protocol import Job
from tuner.numerics.distance import HOST, Ruler, Tensors
from tuner.numerics.restarts import eager_arm
from tuner.numerics.trace_errors import GRADIENT_CEILING, LOSS_CEILING, YARDSTICK_FACTOR, TrainingStart, allowed
from tuner.numerics.training_trace import load_state, snapshot, start_of, state
from tuner.records import Failure, FailureKind, Phase
from tuner.workloads.plain_step import plain_step

STEPS = 24
STANDARD_ERRORS = 4.0
UPDATE_FLOOR = 0.5
TINY = 1e-12
NOTE = (
    f"random numbers of the step cannot be switched off, so means over {STEPS} steps on the same weights were "
    "compared: loss, gradient, and for parameters the size of one update"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Losses and mean gradient of many steps that differ only in their random numbers, and the size of one update."""

    losses: list[float]
    gradient: Tensors
    update: float

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    @property
    def loss_variance(self) -> float:
        """Variance of the mean loss."""
        return variance(self.losses) / len(self.losses)


def means_gate(job: Job) -> Numerics | Failure:
    """Checks the job's last arm. Raises DeclinedError when a choice cannot be applied, and whatever the arm raises."""
    arm = LiveArm(job, job.arms[-1])
    start = start_of(arm.workload)
    candidate = _sample_arm(arm, start, job.seed)
    ruler = Ruler(pick_device(job.device))
    sizes = {"loss": candidate.loss, "gradient": ruler.norm(candidate.gradient), "update": candidate.update}
    for what, value in sizes.items():
        if not math.isfinite(value):
            return Failure(kind=FailureKind.NOT_FINITE, phase=Phase.NUMERICS, reason=f"the mean {what} is {value}")
    yardstick = _sample_arm(eager_arm(job, randomness=True), start, job.seed + 1)
    reference, again = (_sample_plain(job, start, job.seed + offset) for offset in (2, 3))
    return _judged(_Samples(candidate, reference, yardstick, again), arm.tolerance, pick_device(job.device))


def _sample_plain(job: Job, start: TrainingStart, seed: int) -> Sample:
    workload = fresh_workload(job)
    load_state(workload, start)
    with full_precision():
        return _sample(workload, lambda: plain_step(workload, *workload.batch), Rates(workload.optimizer), start, seed)


def _sample_arm(arm: LiveArm, start: TrainingStart, seed: int) -> Sample:
    try:
        load_state(arm.workload, start)
        arm.rates.scale(0.0)
        arm.settle()
        return _sample(arm.workload, arm.run, arm.rates, start, seed)
    finally:
        arm.close()


def _sample(
    workload: Workload, step: Callable[[], torch.Tensor], rates: Rates, start: TrainingStart, seed: int
) -> Sample:
    rates.scale(0.0)
    torch.manual_seed(seed)
    losses: list[float] = []
    total: list[torch.Tensor | None] = [None] * len(start.names)
    for _ in range(STEPS):
        recorded = snapshot(workload, step())
        losses.append(recorded.loss)
        for index, gradient in enumerate(recorded.gradients):
            if gradient is not None:
                before = total[index]
                total[index] = gradient / STEPS if before is None else before + gradient / STEPS
    rates.scale(1.0)
    step()
    return Sample(losses, total, HOST.distance(state(workload)[0], start.parameters))


@dataclass(frozen=True, slots=True)
class _Samples:
    """`again` is the reference with other random numbers; its error is due to chance alone."""

    candidate: Sample
    reference: Sample
    yardstick: Sample
    again: Sample


def _judged(samples: _Samples, floor: Tolerance, device: torch.device) -> Numerics | Failure:
    ruler = Ruler(device)
    found, own, chance = (
        _errors(sample, samples.reference, ruler) for sample in (samples.candidate, samples.yardstick, samples.again)
    )
    limits = (
        max(_chance_of_loss(samples), allowed(own[0], floor.loss, LOSS_CEILING)),
        max(YARDSTICK_FACTOR * chance[1], allowed(own[1], floor.gradient, GRADIENT_CEILING)),
        max(YARDSTICK_FACTOR * chance[2], UPDATE_FLOOR),
    )
    for what, error, limit in zip(("mean loss", "mean gradient", "size of an update"), found, limits, strict=True):
        if error > limit:
            reason = f"{what}: relative error {error:.2e} against the reference, {limit:.2e} is allowed ({NOTE})"
            return Failure(kind=FailureKind.WRONG, phase=Phase.NUMERICS, reason=reason)
    return Numerics(
        steps=STEPS,
        loss_error=found[0],
        gradient_error=found[1],
        parameter_error=found[2],
        loss_allowed=limits[0],
        gradient_allowed=limits[1],
        parameter_allowed=limits[2],
        note=NOTE,
    )


def _chance_of_loss(samples: _Samples) -> float:
    """Four standard errors of the difference of two mean losses, relative to the reference."""
    error = math.sqrt(samples.candidate.loss_variance + samples.reference.loss_variance)
    return STANDARD_ERRORS * error / max(abs(samples.reference.loss), TINY)


def _errors(sample: Sample, reference: Sample, ruler: Ruler) -> tuple[float, float, float]:
    """Relative errors of the mean loss, of the mean gradient, and of the size of an update."""
    return (
        abs(sample.loss - reference.loss) / max(abs(reference.loss), TINY),
        ruler.distance(sample.gradient, reference.gradient) / max(ruler.norm(reference.gradient), TINY),
        abs(sample.update - reference.update) / max(reference.update, TINY),
    )
