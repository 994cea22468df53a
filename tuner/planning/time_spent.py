"""Trials in; where the time of their run went, part by part, out. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.records import Trial

#: Part of a trial, in the order in which a trial passes through them -> what it is called.
PARTS: Final[Mapping[str, str]] = {
    "start_s": "Starting Python and importing torch",
    "build_s": "Loading the workload and running it as given",
    "numerics_s": "The numbers, and the candidate's first compilation",
    "warmup_s": "Warming up, and compiling what it is timed against",
    "queued_s": "Waiting for what another process compiled",
    "waited_s": "Waiting for its turn to be timed",
    "timing_s": "Timing",
}


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The sums over the trials of which it is known, in seconds by PARTS, and how many of all trials these are."""

    parts_s: Mapping[str, float]
    known: int
    trials: int

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def sentence(self) -> str:
        """What these are sums of."""
        of = "" if self.known == self.trials else f"{self.known:,} of "
        rest = "; of the others it is not known" if of else ""
        counted = f"{self.trials:,} trial{'' if self.trials == 1 else 's'}"
        return (
            f"Sums over {of}{counted}{rest}. As several are prepared at once, and one at a time is timed, they can "
            "come to more than the run took."
        )


def time_spent(trials: Sequence[Trial]) -> TimeSpent | None:
    """None where it is known of no trial, or nothing took any time."""
    known = [trial.spent for trial in trials if trial.spent is not None]
    spent = TimeSpent({part: sum(getattr(each, part) for each in known) for part in PARTS}, len(known), len(trials))
    return spent if spent.total_s else None
