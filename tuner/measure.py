"""A workload or a Job in, an Inspection or a Measurement out, or the Failure that came instead. No torch here."""

from kitsune.proof import LongProof
from tuner.protocol import Inspection, Job, Limits, misfit
from tuner.records import Failure, FailureKind, Measurement, Phase
from tuner.supervise import Check, Outcome, go_on, supervise

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
    outcome = _run(Job(kind="inspect", workload=spec, device=device, seed=seed), limits, check)
    assert isinstance(outcome, Inspection | Failure)
    return outcome


def measure(job: Job, *, limits: Limits = DEFAULT_LIMITS, check: Check = go_on) -> Measurement | Failure:
    """Proves the numbers of the job's last arm, then times all arms interleaved. `limits` in seconds a phase.

    Whatever the measuring process does is a Failure, never an exception. KeyboardInterrupt, and what `check` raises,
    ends it and propagates.
    """
    # timing that ends by itself keeps its rounds; timing that is killed loses them
    limit_s = limits.of(Phase.TIMING)
    budget_s = min(job.budget_s or limit_s, TIMING_SHARE * limit_s)
    outcome = _run(job.model_copy(update={"budget_s": budget_s}), limits, check)
    assert isinstance(outcome, Measurement | Failure)
    return outcome


def prove(job: Job, *, limits: Limits = DEFAULT_LIMITS, check: Check = go_on) -> LongProof | Failure:
    """The long look at the numbers of the job's last arm, within `job.budget_s` beside what compiling takes."""
    outcome = _run(job.model_copy(update={"kind": "prove"}), limits, check)
    assert isinstance(outcome, LongProof | Failure)
    return outcome


def _run(job: Job, limits: Limits, check: Check) -> Outcome:
    outcome = supervise(job, limits, check=check)
    problem = None if isinstance(outcome, Failure) else misfit(job, outcome)
    if problem is None:
        return outcome
    reason = f"the answer of the measuring process does not fit the question: {problem}"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason=reason)
