"""A workload or a Job in, an Inspection or a Measurement out, or the Failure that came instead. No torch here."""

import time

from kitsune.long_proof import LongProof
from tuner.measuring import fault_injection
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
    """What the workload is and what can be tried on it. A workload that fails as given is a Failure in phase build."""
    job = Job(kind="inspect", workload=spec, device=device, seed=seed)
    outcome = checked(job, supervise(job, limits, check=check))
    assert isinstance(outcome, Inspection | Failure)
    return outcome


def measure(job: Job, *, limits: Limits = DEFAULT_LIMITS, check: Check = go_on) -> Measurement | Failure:
    """Proves the numbers of the job's last arm, then times all arms interleaved. `limits` in seconds a phase.

    Whatever the measuring process does is a Failure, never an exception. KeyboardInterrupt, and what `check` raises,
    ends it and propagates.
    """
    job = within(job, limits)
    outcome = checked(job, supervise(job, limits, check=check))
    assert isinstance(outcome, Measurement | Failure)
    return outcome


def prove(job: Job, *, limits: Limits = DEFAULT_LIMITS, check: Check = go_on) -> LongProof | Failure:
    """The long look at the numbers of the job's last arm, within `job.budget_s` beside what compiling takes."""
    job = within(job.model_copy(update={"kind": "prove"}), limits)
    outcome = checked(job, supervise(job, limits, check=check))
    assert isinstance(outcome, LongProof | Failure)
    return outcome


def within(job: Job, limits: Limits) -> Job:
    """The job knowing its limits: it ends by itself before them, and what it has is kept, which a kill would lose.

    To be called when the process is given the job.
    """
    update = {} if limits.total_s is None else {"end_s": time.monotonic() + limits.total_s}
    if job.kind == "measure":
        limit_s = limits.of(Phase.TIMING)
        update["budget_s"] = min(job.budget_s or limit_s, TIMING_SHARE * limit_s)
    return job.model_copy(update=update)


def checked(job: Job, outcome: Outcome) -> Outcome:
    """The outcome when it can be the answer to this job, else the Failure that it is."""
    if fault_injection.struck("gpu-lost"):
        return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason="CUDA error: device-side assert triggered")
    problem = None if isinstance(outcome, Failure) else misfit(job, outcome)
    if problem is None:
        return outcome
    reason = f"the answer of the measuring process does not fit the question: {problem}"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason=reason)
