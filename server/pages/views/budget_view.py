"""The budget of a run: how its time was spent, and which configurations it had no time to measure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kitsune.plan import Plan
from server.charts.drawing import words
from tuner.planning.time_spent import PARTS, time_spent
from tuner.planning.untried import untried
from tuner.records import Run, RunStatus, Trial
from tuner.statistics.plan_evidence import words as words_of_knobs

UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class PartRow:
    """A phase of the trials: its total time over all of them, and its share."""

    name: str
    took: str
    share: str


@dataclass(frozen=True, slots=True)
class SpentView:
    """The totals over the trials with known times, and a sentence that explains them."""

    sentence: str
    rows: tuple[PartRow, ...]
    total: str


def spent_view(trials: Sequence[Trial]) -> SpentView | None:
    """None if no trial has known times, or their sum is zero."""
    spent = time_spent(trials)
    if spent is None:
        return None
    rows = tuple(
        PartRow(PARTS[part], words.lasted(took_s), words.percent(took_s / spent.total_s))
        for part, took_s in spent.parts_s.items()
    )
    return SpentView(spent.sentence, rows, words.lasted(spent.total_s))


@dataclass(frozen=True, slots=True)
class UntriedRow:
    """A configuration that was not tried, and its expected time."""

    knobs: str
    about: str


@dataclass(frozen=True, slots=True)
class UntriedView:
    """The table, and a sentence about the time that it would take."""

    sentence: str
    rows: tuple[UntriedRow, ...]


def untried_view(run: Run, trials: Sequence[Trial], plan: Plan | None) -> UntriedView | None:
    """None for a run that is unfinished, cancelled or failed, and if no untried configuration is left."""
    found = untried(run, trials, plan) if run.status is RunStatus.FINISHED else []
    if not found:
        return None
    total_s = sum(each.expected_s or 0.0 for each in found)
    more = f" They take about {words.lasted(total_s)}, and confirming the best comes on top." if total_s else ""
    rows = (UntriedRow(words_of_knobs(each.knobs), _about(each.expected_s)) for each in found)
    return UntriedView(f"The budget had no time to measure these.{more}", tuple(rows))


def _about(expected_s: float | None) -> str:
    return UNKNOWN if expected_s is None else words.lasted(expected_s)
