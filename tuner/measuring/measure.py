"""Runs one job in a measuring process, and checks that its answer fits the job. Does not import torch."""

import time

from kitsune.long_proof import LongProof
from tuner import fault_injection
from tuner.measuring.child_process import Check, go_on, supervise
from tuner.measuring.protocol import Inspection, Job, Limits, Outcome, misfit
from tuner.records import Failure, FailureKind, Measurement, Phase

DEFAULT_LIMITS = Limits()
TIMING_SHARE = 0.8


def inspect(
    spec: str,
    device: str,
    *,
    seed: int = 0,
    limits: Limits = DEFAULT_LIMITS,
    check: Check = go_on,
) -> Inspection | Failure:
    """Describes the workload and the choices that apply to it. A workload that fails as given is a Failure in phase
    build."""
    job = Job(kind="inspect", workload=spec, device=device, seed=seed)
    outcome = checked(job, supervise(job, limits, check=check))
    assert isinstance(outcome, Inspection | Failure)
    return outcome


def measure(job: Job, *, limits: Limits = DEFAULT_LIMITS, check: Check = go_on) -> Measurement | Failure:
    """Checks the numerics of the job's last arm, then times all arms interleaved. `limits` are seconds per phase.

    Errors of the measuring process become a Failure, never an exception. KeyboardInterrupt, and what `check` raises,
    kills it and propagates.
    """
    job = within(job, limits)
    outcome = checked(job, supervise(job, limits, check=check))
    assert isinstance(outcome, Measurement | Failure)
    return outcome


def prove(job: Job, *, limits: Limits = DEFAULT_LIMITS, check: Check = go_on) -> LongProof | Failure:
    """The long numerics gate for the job's last arm. Takes `job.budget_s`, not counting compilation."""
    job = within(job.model_copy(update={"kind": "prove"}), limits)
    outcome = checked(job, supervise(job, limits, check=check))
    assert isinstance(outcome, LongProof | Failure)
    return outcome


def within(job: Job, limits: Limits) -> Job:
    """The job with its limits written into it, so that the child can end in time and answer with what it has.

    Call it when the process is given the job: `end_s` counts from now.
    """
    update = {} if limits.total_s is None else {"end_s": time.monotonic() + limits.total_s}
    if job.kind == "measure":
        limit_s = limits.of(Phase.TIMING)
        update["budget_s"] = min(job.budget_s or limit_s, TIMING_SHARE * limit_s)
    return job.model_copy(update=update)


def checked(job: Job, outcome: Outcome) -> Outcome:
    """The outcome if it is a valid answer to this job, else a Failure."""
    if fault_injection.struck("gpu-lost"):
        return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason="CUDA error: device-side assert triggered")
    problem = None if isinstance(outcome, Failure) else misfit(job, outcome)
    if problem is None:
        return outcome
    reason = f"the answer of the measuring process does not fit the question: {problem}"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason=reason)
