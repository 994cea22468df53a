"""Records the launches of a step and sums up their times by class of kernels, as `kitsune explain` does."""

from collections.abc import Callable, Iterator, Mapping

from kitsune.class_tables import MAX_NOTES, ClassTable
from kitsune.errors import UnfitError
from kitsune.knobs import Choice
from kitsune.runtime.report import Report
from tuner.building.arms import fresh_workload
from tuner.child.stream_forecast import LOOKED_AT, rehearse
from tuner.measuring.protocol import Job, one_line
from tuner.records import Phase

NO_CEILINGS = "no memory to measure what this device can do at best"


def explain_job(job: Job, enter: Callable[[Phase], None]) -> ClassTable:
    """The table of the job's only arm. Calls `enter` when the workload is loaded.

    Raises the errors of loading and of `rehearse`, and UnfitError for lack of memory.
    """
    workload = fresh_workload(job, as_given=not job.arms[0].knobs)
    enter(Phase.WARMUP)
    found = rehearse(workload, job.arms[0].knobs, 1)
    if not found.classes:
        raise UnfitError(NO_CEILINGS)
    told = tuple(map(one_line, notes(found.report, job.arms[0].knobs)))
    return ClassTable(classes=found.classes, notes=told[:MAX_NOTES])


def notes(report: Report, knobs: Mapping[str, Choice]) -> Iterator[str]:
    """How the recorded step differs from these choices, and what was noted of it."""
    applied = {knob: choice for knob, choice in report.applied.items() if knob not in LOOKED_AT}
    yield from (f"recorded with {knob}={choice}" for knob, choice in applied.items() if knobs.get(knob) != choice)
    yield from (f"{knob}: {reason}" for knob, reason in report.declined.items() if knob not in LOOKED_AT)
    yield from report.notes
