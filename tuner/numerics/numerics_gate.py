"""The numerics gate: checks that a candidate still trains the model correctly, before it is timed.

The candidate trains for some steps with changing data and learning rates until after it has settled, so that replays of
a captured graph are compared, too. The reference (plain torch in float64 if that is affordable, else in fp32 without
TF32) and the yardstick (eager with the candidate's precision and nothing else) train from the same weights. Both are
the same for all candidates that settle in time, so the first child of a run stores them for the others.
"""

import contextlib
import gc
import math
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from kitsune.device.backend import pick_device, synchronize
from kitsune.device.tf32 import full_precision
from kitsune.plan import Numerics
from tuner.building.arms import LiveArm, fresh_workload
from tuner.building.compile_ahead import compiled_ahead
from tuner.building.dropout import dropout_off
from tuner.building.probe import Probe, draws_random
from tuner.measuring.protocol import Job
from tuner.numerics.distance import Ruler
from tuner.numerics.reference import AS_GIVEN, NOT_CONVERTIBLE, dtypes_of_references, reference_step
from tuner.numerics.reference_cache import ReferenceCache, cache_for
from tuner.numerics.restarts import eager_arm
from tuner.numerics.stochastic_gate import means_gate
from tuner.numerics.trace_errors import LATE_STEPS, Errors, Trace, TrainingStart, errors_between, judge
from tuner.numerics.training_trace import (
    RATES,
    BatchAt,
    batches_of,
    follow,
    load_state,
    perturb,
    place_for,
    remember,
    snapshot,
    start_of,
    state,
)
from tuner.records import Failure, FailureKind, Phase

STEPS = 10  # a compiled and captured step has settled after 5
MAX_STEPS = 40
REFERENCE_S = 60.0  # time limit of the reference, unless the job sets one
DOUBLE_AT_LEAST = 1.5  # float64 is at least so many times slower than fp32, on the GPUs that are best at it


@dataclass(frozen=True, slots=True)
class Proof:
    """The numerics, and the settled candidate if it can be timed as it is (None if it was built without dropout)."""

    numerics: Numerics
    arm: LiveArm | None


def prove(job: Job, probe: Probe) -> Proof | Failure:
    """Checks the job's last arm. Raises DeclinedError when a choice cannot be applied, and whatever the arm raises."""
    if not probe.random:
        return _prove(job, probe)
    with dropout_off():
        is_deterministic = not draws_random(fresh_workload(job, randomness=False), pick_device(job.device))
        if is_deterministic:
            with compiled_ahead(job):
                proof = _prove(job, probe)
    if not is_deterministic:
        numerics = means_gate(job)
        return numerics if isinstance(numerics, Failure) else Proof(numerics, None)
    if isinstance(proof, Failure):
        return proof
    if proof.arm is not None:
        proof.arm.close()
    torch.compiler.reset()  # the compiled code is without dropout
    return Proof(proof.numerics, None)


def _prove(job: Job, probe: Probe) -> Proof | Failure:
    arm = LiveArm(job, job.arms[-1], randomness=not probe.random)
    place = place_for(arm.workload.model, arm.device, probe.peak_bytes)
    with arm.aside():
        start = start_of(arm.workload, place)
    batches = batches_of(arm.workload.batch, job.seed, vary=probe.vary)
    torch.manual_seed(job.seed)
    traced = _trace_candidate(arm, start, batches, place)
    arm.rates.scale(1.0)
    if isinstance(traced, Failure):
        return traced
    arm.weigh()
    if large := arm.too_large(Phase.NUMERICS):
        return large
    cache = cache_for(job.folder, start, arm.workload.batch) if _is_shareable(traced) else ReferenceCache(None)
    reference, note = cache.trace("reference", lambda: _trace_reference(job, probe, start, batches, traced))
    ruler = Ruler(pick_device(job.device))

    def yardstick() -> Errors:
        found = _trace_yardstick(job, probe, start, batches, traced, perturbed=note in AS_GIVEN)
        return errors_between(found, reference, start, ruler)

    numerics, wrong = judge(
        errors_between(traced, reference, start, ruler),
        cache.errors(f"yardstick-{job.arms[-1].knobs.get('precision', 'as-given')}", yardstick),
        arm.tolerance,
        start.names,
        traced.steps,
        "; ".join(filter(None, [note, *probe.notes])),
    )
    return Proof(numerics, arm) if wrong is None else _failed(FailureKind.WRONG, wrong)


def _is_shareable(trace: Trace) -> bool:
    """Whether other candidates have the same steps, so that they can share the reference."""
    return trace.steps == STEPS and not trace.skipped


def _trace_candidate(arm: LiveArm, start: TrainingStart, batch_at: BatchAt, place: torch.device) -> Trace | Failure:
    """Trains until LATE_STEPS steps have followed the last one that compiled, captured or overflowed."""
    trace = Trace()
    scaled = arm.spec.knobs.get("precision") == "fp16"
    regular_steps = 0  # steps since the last one that compiled, captured or overflowed
    for index in count():
        arm.rates.scale(RATES[index % len(RATES)])
        settled = arm.step.is_settled
        loss = arm(*batch_at(index))
        with arm.aside():
            recorded = snapshot(arm.workload, loss, place)
            remember(trace, index, recorded)
        problem = recorded.first_not_finite(start.names)
        overflowed = problem is not None and scaled
        if overflowed:
            trace.skipped.add(index)
        elif problem is not None:
            return _failed(FailureKind.NOT_FINITE, f"{problem} at step {index}")
        regular_steps = 0 if overflowed or not settled else regular_steps + 1
        if regular_steps >= LATE_STEPS and trace.steps >= STEPS:
            break
        if trace.steps >= MAX_STEPS:
            if overflowed:
                return _failed(FailureKind.NOT_FINITE, f"fp16 still overflows after {MAX_STEPS} steps: {problem}")
            break
    with arm.aside():
        trace.parameters, trace.buffers = state(arm.workload, place)
    return _finite(trace, start)


def _finite(trace: Trace, start: TrainingStart) -> Trace | Failure:
    for name, tensor in zip(start.names, trace.parameters, strict=True):
        if not torch.isfinite(tensor).all():
            return _failed(FailureKind.NOT_FINITE, f"{name} is not finite after {trace.steps} steps")
    return trace


def _trace_reference(
    job: Job, probe: Probe, start: TrainingStart, batches: BatchAt, candidate: Trace
) -> tuple[Trace, str]:
    """The reference's trace, and a note when it is not in float64."""
    within_s = job.reference_s or REFERENCE_S
    step_s = min(probe.step_ms, job.step_ms or probe.step_ms) / 1e3
    double = DOUBLE_AT_LEAST * step_s * candidate.steps <= within_s
    *wider, (_, note) = dtypes_of_references(start.parameters, double=double)
    for dtype, wider_note in wider:
        with contextlib.suppress(*NOT_CONVERTIBLE, SlowError):
            return _trace_plain(job, probe, start, batches, candidate, dtype, within_s), wider_note
        gc.collect()
    return _trace_plain(job, probe, start, batches, candidate), note


class SlowError(Exception):
    """A step in float64 took so long that all of them would exceed the limit."""


def _trace_plain(
    job: Job,
    probe: Probe,
    start: TrainingStart,
    batches: BatchAt,
    candidate: Trace,
    dtype: torch.dtype | None = None,
    within_s: float = math.inf,
) -> Trace:
    """Trains as given, but in `dtype`.

    Raises SlowError if the second step shows that all would take longer than `within_s` seconds in float64.
    """
    workload = fresh_workload(job, randomness=not probe.random)
    load_state(workload, start)
    plain = reference_step(workload, dtype)
    limit_s = within_s if dtype is torch.float64 else math.inf
    began = time.perf_counter()

    def step(index: int, x: Any, y: Any) -> torch.Tensor:
        nonlocal began
        if index == 2 and (time.perf_counter() - began) * (candidate.steps - 1) > limit_s:
            raise SlowError
        if index == 1:  # the first step also loads libraries, so it is not timed
            synchronize(pick_device(job.device))
            began = time.perf_counter()
        return plain(x, y, index not in candidate.skipped)

    with full_precision():
        return follow(workload, step, job.seed, batches, candidate)


def _trace_yardstick(
    job: Job, probe: Probe, start: TrainingStart, batches: BatchAt, candidate: Trace, *, perturbed: bool
) -> Trace:
    """Trains eager with the candidate's precision. Against a reference of the same precision it would have no error at
    all, so then its weights start a few units in the last place away."""
    arm = eager_arm(job, randomness=not probe.random)
    try:
        load_state(arm.workload, start)
        if perturbed:
            perturb(arm.workload, job.seed)
        return follow(arm.workload, lambda _, x, y: arm(x, y), job.seed, batches, candidate)
    finally:
        arm.close()


def _failed(kind: FailureKind, reason: str) -> Failure:
    return Failure(kind=kind, phase=Phase.NUMERICS, reason=reason)
