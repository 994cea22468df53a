"""The first look at the workload of a run, in a process of its own."""

from collections.abc import Callable

from kitsune.errors import BaselineError, UnfitError, WorkloadError
from kitsune.plan import Match
from tuner.measuring.child_process import Check
from tuner.measuring.crew import Crew
from tuner.measuring.protocol import Inspection, Job, Limits
from tuner.records import Failure, FailureKind, Phase, Run


def first_look(
    crew: Crew, run: Run, spec: str, limits: Callable[[], Limits], check: Check, *, trials: int
) -> Inspection:
    """Runs the step as given; if it runs out of memory, again with its blocks as checkpoints, in another process.

    `trials`: how many the run has already, which say nothing about another workload or machine. Raises BaselineError
    when the step as given fails, UnfitError when no code of it could run, and WorkloadError.
    """
    for checkpointed in (False, True):
        job = Job(kind="inspect", workload=spec, device=run.device, seed=run.seed, checkpointed=checkpointed)
        crew.begin(job, limits())
        found = crew.finished(check).outcome
        if not (isinstance(found, Failure) and found.kind is FailureKind.OUT_OF_MEMORY):
            break
    if isinstance(found, Failure):
        if found.phase is Phase.START:  # no code of the workload has run
            raise UnfitError(f"this machine cannot look at the workload: {found.reason}")
        raise BaselineError(f"the workload fails as given: {found.reason}")
    assert isinstance(found, Inspection)
    if trials and (change := change_of(run, found)):
        raise WorkloadError(
            f"{change} since {trials} trials of run {run.id} were made, so they say nothing about it; start a new run"
        )
    return found


def change_of(run: Run, found: Inspection) -> str | None:
    """What has changed since the run was last worked on, for a message; None if nothing has."""
    before = run.environment
    if run.fingerprint not in ("", found.fingerprint):
        return f"{run.workload} has changed"
    if before is not None and before.match(found.environment)[0] is Match.REFUSED:
        return f"the run has moved from {before.gpu} to {found.environment.gpu}"
    return None
