"""A workload or a Job in, an Inspection or a Measurement out, or the Failure that came instead. No torch here."""

from pathlib import Path

from tuner.protocol import Inspection, Job, Limits, misfit
from tuner.records import Failure, FailureKind, Measurement, Phase
from tuner.settings import Settings
from tuner.supervise import Outcome, supervise

NO_LIMITS = Limits()


def inspect(
    spec: str, device: str, *, seed: int = 0, limits: Limits = NO_LIMITS, cache: Path | None = None
) -> Inspection | Failure:
    """What the workload is and what can be tried on it. A workload that fails as given is a Failure in phase build."""
    outcome = _run(Job(kind="inspect", workload=spec, device=device, seed=seed), limits, cache)
    assert not isinstance(outcome, Measurement)
    return outcome


def measure(job: Job, *, limits: Limits = NO_LIMITS, cache: Path | None = None) -> Measurement | Failure:
    """Proves the numbers of the job's last arm, then times all arms interleaved. `limits` in seconds a phase.

    Whatever the measuring process does is a Failure, never an exception; KeyboardInterrupt ends it and propagates.
    """
    outcome = _run(job, limits, cache)
    assert not isinstance(outcome, Inspection)
    return outcome


def _run(job: Job, limits: Limits, cache: Path | None) -> Outcome:
    outcome = supervise(job, limits, cache or Settings.from_environment().home / "cache")
    problem = None if isinstance(outcome, Failure) else misfit(job, outcome)
    if problem is None:
        return outcome
    reason = f"the answer of the measuring process does not fit the question: {problem}"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason=reason)
