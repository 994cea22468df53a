"""Trials in; the table of where the time of their run went out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.charts.drawing import words
from tuner.planning.time_spent import PARTS, time_spent
from tuner.records import Trial


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part of the trials: what it came to in all of them together, and its share of the whole."""

    name: str
    took: str
    share: str


@dataclass(frozen=True, slots=True)
class SpentView:
    """The sums over the trials of which it is known, and what they are sums of."""

    sentence: str
    rows: tuple[PartRow, ...]
    total: str


def spent_view(trials: Sequence[Trial]) -> SpentView | None:
    """None where it is known of no trial, or nothing took any time."""
    spent = time_spent(trials)
    if spent is None:
        return None
    rows = tuple(
        PartRow(PARTS[part], words.lasted(took_s), words.percent(took_s / spent.total_s))
        for part, took_s in spent.parts_s.items()
    )
    return SpentView(spent.sentence, rows, words.lasted(spent.total_s))
