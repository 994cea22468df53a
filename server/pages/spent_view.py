"""Trials in; where the time of their run went, part by part, out. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.pages import words
from tuner.records import Trial

#: Part of a trial, in the order in which a trial passes through them -> what it is called.
PARTS: Final[Mapping[str, str]] = {
    "start_s": "Starting Python and importing torch",
    "build_s": "Loading the workload and running it as given",
    "numerics_s": "The numbers, and the candidate's first compilation",
    "warmup_s": "Warming up, and compiling what it is timed against",
    "waited_s": "Waiting for its turn to be timed",
    "timing_s": "Timing",
}


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
    known = [trial.spent for trial in trials if trial.spent is not None]
    sums = {part: sum(getattr(spent, part) for spent in known) for part in PARTS}
    total = sum(sums.values())
    if not total:
        return None
    rows = [PartRow(name, words.lasted(sums[part]), words.percent(sums[part] / total)) for part, name in PARTS.items()]
    return SpentView(_sentence(len(known), len(trials)), tuple(rows), words.lasted(total))


def _sentence(known: int, trials: int) -> str:
    of = "" if known == trials else f"{known:,} of "
    return (
        f"Sums over {of}{words.count(trials, 'trial')}{'; the others do not know' if of else ''}. As several are "
        "prepared at once, and one at a time is timed, they can come to more than the run took."
    )
