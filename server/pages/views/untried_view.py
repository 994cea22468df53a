"""A run and its trials in; the table of what its budget had no time for out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kitsune.plan import Plan
from server.charts.drawing import words
from tuner.planning.untried import untried
from tuner.records import Run, RunStatus, Trial
from tuner.statistics.plan_evidence import words as words_of_knobs

UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class UntriedRow:
    """A configuration that would have been tried, and about how long that takes."""

    knobs: str
    about: str


@dataclass(frozen=True, slots=True)
class UntriedView:
    """What more time would bring, and the configurations."""

    sentence: str
    rows: tuple[UntriedRow, ...]


def untried_view(run: Run, trials: Sequence[Trial], plan: Plan | None) -> UntriedView | None:
    """None while the run goes on, where its user ended it, and where nothing is left of what is tried first."""
    found = untried(run, trials, plan) if run.status is RunStatus.FINISHED else []
    if not found:
        return None
    total_s = sum(each.expected_s or 0.0 for each in found)
    more = f" They take about {words.lasted(total_s)}, and confirming the best comes on top." if total_s else ""
    rows = (UntriedRow(words_of_knobs(each.knobs), _about(each.expected_s)) for each in found)
    return UntriedView(f"The budget had no time to measure these.{more}", tuple(rows))


def _about(expected_s: float | None) -> str:
    return UNKNOWN if expected_s is None else words.lasted(expected_s)
