"""Runs the step as given: whether it works, whether it draws random numbers, its time and its memory."""

import math
import time
from dataclasses import dataclass

import torch

from kitsune.device.backend import allocated_bytes, peak_bytes, pick_device, reset_peak, rng_state, synchronize
from kitsune.errors import SURPRISES, WorkloadError
from kitsune.workload import Workload
from tuner.building.arms import fresh_workload
from tuner.measuring.protocol import Job
from tuner.records import Failure, FailureKind, Phase
from tuner.workloads.batches import varied
from tuner.workloads.plain_step import plain_step

TIMED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Probe:
    """Properties of the step as given. `vary`: whether other batches of the same shapes work; `notes`: why not."""

    random: bool
    vary: bool
    step_ms: float
    peak_bytes: int
    parameters: int
    notes: tuple[str, ...] = ()


def probe_workload(job: Job) -> Probe | Failure:
    """Runs some plain steps. Raises whatever the workload raises; NaN and infinity are a Failure."""
    device = pick_device(job.device)
    before_bytes = allocated_bytes(device)
    reset_peak(device)
    workload = fresh_workload(job)
    torch.manual_seed(job.seed)
    is_random = draws_random(workload, device)
    check_gradients(workload)
    problem = not_finite(workload)
    if problem is not None:
        return Failure(kind=FailureKind.NOT_FINITE, phase=Phase.BUILD, reason=f"the step as given fails: {problem}")
    step_ms = _step_ms(workload, device)
    problem_with_other = _problem_with_other_batch(workload, job.seed)
    return Probe(
        random=is_random,
        vary=problem_with_other is None,
        step_ms=step_ms,
        peak_bytes=max(0, peak_bytes(device) - before_bytes),
        parameters=sum(parameter.numel() for parameter in workload.model.parameters()),
        notes=()
        if problem_with_other is None
        else (f"the same batch at every step: another one fails with {problem_with_other}",),
    )


def draws_random(workload: Workload, device: torch.device) -> bool:
    """Whether one plain step advances a random generator of torch."""
    before = rng_state(device)
    plain_step(workload, *workload.batch)
    after = rng_state(device)
    return any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def check_gradients(workload: Workload) -> None:
    """Raises WorkloadError for a sparse gradient: no technique takes one, and its numbers could not be compared."""
    for name, parameter in workload.model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise WorkloadError(f"the gradient of {name} is sparse, which cannot be tuned: build it with sparse=False")


def not_finite(workload: Workload, *, gradients: bool = True) -> str | None:
    """Which parameter or gradient is NaN or infinite after a step, or None."""
    for name, parameter in workload.model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"{name} is not finite"
        if gradients and parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of {name} is not finite"
    return None


def _step_ms(workload: Workload, device: torch.device) -> float:
    times = []
    for _ in range(TIMED_STEPS):
        synchronize(device)
        begin = time.perf_counter()
        plain_step(workload, *workload.batch)
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[TIMED_STEPS // 2]


def _problem_with_other_batch(workload: Workload, seed: int) -> str | None:
    """Why the step fails on a varied batch, or None."""
    try:
        loss = float(plain_step(workload, *varied(workload.batch, seed + 1), update=False))
    except SURPRISES as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None if math.isfinite(loss) else f"a loss of {loss}"
