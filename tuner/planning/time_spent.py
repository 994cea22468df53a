"""Sums up where the time of a run went, by part of a trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.records import Trial

#: Parts of a trial in their order -> the label shown to users.
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
    """Seconds by key of PARTS, summed over the `known` trials that recorded them, and the number of all trials."""

    parts_s: Mapping[str, float]
    known: int
    trials: int

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def sentence(self) -> str:
        """The explanation below the table."""
        of = "" if self.known == self.trials else f"{self.known:,} of "
        rest = "; of the others it is not known" if of else ""
        counted = f"{self.trials:,} trial{'' if self.trials == 1 else 's'}"
        return (
            f"Sums over {of}{counted}{rest}. As several are prepared at once, and one at a time is timed, they can "
            "come to more than the run took."
        )


def time_spent(trials: Sequence[Trial]) -> TimeSpent | None:
    """The sums; None where no trial recorded its time, or all recorded 0."""
    known = [trial.spent for trial in trials if trial.spent is not None]
    spent = TimeSpent({part: sum(getattr(each, part) for each in known) for part in PARTS}, len(known), len(trials))
    return spent if spent.total_s else None
