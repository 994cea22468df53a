"""The table of how the time of a run was spent."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.charts.drawing import words
from tuner.planning.time_spent import PARTS, time_spent
from tuner.records import Trial


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
