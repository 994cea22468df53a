"""What one measuring process answers to a job, without the loop of a tuning run."""

from collections.abc import Sequence

from tuner.measuring.child_process import COMMAND, Check, go_on
from tuner.measuring.crew import Children
from tuner.measuring.protocol import Job, Limits, Outcome


def outcome_of(
    job: Job, limits: Limits | None = None, command: Sequence[str] = COMMAND, check: Check = go_on
) -> Outcome:
    """Gives the job to a crew of one process; it is gone afterwards, also when `check` raises."""
    with Children(job.workload, job.device, 0, command) as crew:
        crew.begin(job, limits or Limits())
        return crew.finished(check).outcome
