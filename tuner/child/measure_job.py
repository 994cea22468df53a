"""Measures the arms of a job: probe, numerics gate, warm-up, interleaved timing."""

import time
from collections.abc import Callable
from functools import partial

import torch

from kitsune.device.backend import environment, pick_device
from kitsune.plan import Numerics
from tuner.building.arms import DOES_NOT_FIT, LiveArm
from tuner.building.probe import not_finite, probe_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.numerics_gate import prove
from tuner.records import Failure, FailureKind, Measurement, Phase
from tuner.timing.clock import clock_of, watches_of
from tuner.timing.interleaved_rounds import RoundSchedule, Timing, hopeless, time_arms

BLOCK_MS = {"cpu": 20.0, "cuda": 50.0}
WARM_S = {"cpu": 0.2, "cuda": 1.0}
# Factor for learning rates while timing. Thousands of steps on one batch at the given rate would diverge, or fit the
# batch until gradients are denormal numbers.
TIMED_RATE = 1e-3
LEFT_SHARE = 0.8  # of the time until the process is killed; the rest is for the current round and the answer

Enter = Callable[[Phase], None]


def measure_job(job: Job, enter: Enter) -> Measurement | Failure:
    """The job's Measurement, or why there is none. Calls `enter` when a phase begins.

    Raises whatever the workload or a technique raises.
    """
    if job.checkpointed and not job.arms[-1].knobs:
        return Failure(kind=FailureKind.TOO_LARGE, phase=Phase.BUILD, reason=DOES_NOT_FIT)
    probe = probe_workload(job)
    if isinstance(probe, Failure):
        return probe
    numerics: Numerics | None = None
    candidate: LiveArm | None = None
    if job.numerics:
        enter(Phase.NUMERICS)
        proof = prove(job, probe)
        if isinstance(proof, Failure):
            return proof
        numerics, candidate = proof.numerics, proof.arm
    enter(Phase.WARMUP)
    arms = _arms(job, candidate)
    if large := arms[-1].too_large(Phase.WARMUP):
        return large
    notes = [f"{arm.spec.name} was still compiling after many steps" for arm in arms if not arm.settle()]
    if probe.random and (frozen := _frozen(arms)):
        return frozen
    enter(Phase.TIMING)
    timing = _time(job, arms)
    if failure := _broken(arms):
        return failure
    return Measurement(
        arms=tuple(arm.record(times) for arm, times in zip(arms, timing.step_ms, strict=True)),
        steps_per_block=timing.steps_per_block,
        dropped_rounds=timing.dropped_rounds,
        disturbed=timing.disturbed,
        causes=timing.causes,
        notes=(*notes, *timing.notes),
        numerics=numerics,
        environment=environment(pick_device(job.device)),
        timeline=arms[-1].timeline() if job.timeline else None,
    )


def _arms(job: Job, candidate: LiveArm | None) -> list[LiveArm]:
    """All arms, settled. The candidate is the arm whose numerics were checked, if that one can be timed."""
    arms = []
    for spec in job.arms:
        is_proven = candidate is not None and spec is job.arms[-1]
        arm = candidate if is_proven and candidate is not None else _settled(job, spec)
        arms.append(arm)
    return arms


def _settled(job: Job, spec: ArmSpec) -> LiveArm:
    """An arm that is settled before the next one is built, so that its peak memory is its own."""
    torch.manual_seed(job.seed)
    arm = LiveArm(job, spec)
    arm.settle()
    arm.weigh()
    return arm


def _frozen(arms: list[LiveArm]) -> Failure | None:
    """The Failure of a candidate whose dropout masks are frozen into compiled or captured code.

    Its losses repeat, while the baseline's are random.
    """
    if not arms[0].is_random() or arms[-1].is_random():
        return None
    reason = "dropout mask is frozen: the loss of one batch repeats from step to step, and does not as given"
    return Failure(kind=FailureKind.WRONG, phase=Phase.WARMUP, reason=reason)


def _broken(arms: list[LiveArm]) -> Failure | None:
    """The Failure of a candidate whose parameters are not finite after the timed steps, while the baseline's are.

    Gradients are not checked: with fp16 they may be infinite in a step that was skipped for that reason.
    """
    found = [not_finite(arm.workload, gradients=False) for arm in (arms[0], arms[-1])]
    if found[0] is not None or found[1] is None:
        return None
    reason = f"after the steps that were timed {found[1]}"
    return Failure(kind=FailureKind.NOT_FINITE, phase=Phase.TIMING, reason=reason)


def _time(job: Job, arms: list[LiveArm]) -> Timing:
    device = pick_device(job.device)
    for arm in arms:
        arm.rates.scale(TIMED_RATE)
    schedule = RoundSchedule(
        rounds=job.rounds,
        block_ms=job.block_ms or BLOCK_MS[device.type],
        warm_s=WARM_S[device.type],
        budget_s=_budget_s(job),
        seed=job.seed,
    )
    cannot_win = partial(hopeless, best_speedup=job.best_speedup) if job.best_speedup else _never
    return time_arms([arm.run for arm in arms], clock_of(device), watches_of(device), schedule, cannot_win)


def _budget_s(job: Job) -> float | None:
    """Seconds that timing may take: at most LEFT_SHARE of the time until the process is killed."""
    if job.end_s is None:
        return job.budget_s
    left_s = max(0.0, LEFT_SHARE * (job.end_s - time.monotonic()))
    return left_s if job.budget_s is None else min(job.budget_s, left_s)


def _never(*_: object) -> bool:
    return False
