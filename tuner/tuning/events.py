"""What a tuning run tells while it goes on.

Started, Inspected, (Trying, Tried) for each trial, several of which may be at work at once, (Confirming, Tried for each
process), then (Ablating, Tried) for each process. Recalled stands before a confirmation that comes before any search.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kitsune.knobs import Choice
from tuner.measuring.protocol import Inspection
from tuner.records import Run, Trial
from tuner.search.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Started:
    """The run is in the database and ours."""

    run: Run


@dataclass(frozen=True, slots=True)
class Inspected:
    """The workload ran once as given."""

    inspection: Inspection


@dataclass(frozen=True, slots=True)
class Budgeted:
    """Nobody named a budget, so that one was taken from the first look; `words` say so."""

    budget_s: float
    words: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """An earlier run has proven a plan for this very step here: it is measured again, in place of a search."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Trying:
    """A trial begins; `total` is None when the budget is time. No Tried follows when the user interrupts it.

    `number` is what it will have if those that are at work end in the order in which they began.
    """

    number: int
    total: int | None
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial has ended, with a measurement or with a failure."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class Crowded:
    """A process ran out of memory beside others. These choices are measured again, with fewer at a time."""

    knobs: Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class PlayingOff:
    """The search has ended; the best few are measured against each other in one process."""

    contenders: tuple[Mapping[str, Choice], ...]


@dataclass(frozen=True, slots=True)
class Confirming:
    """These choices are measured again, fresh, and only those samples are published.

    Told again when the confirmation failed and the next best has its turn, and when it is measured once more, longer.
    """

    knobs: Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Ablating:
    """The plan is kept; it is measured beside itself without each of these knobs.

    No Tried follows when the user interrupts it.
    """

    left_out: tuple[str, ...]


Event = Started | Inspected | Budgeted | Recalled | Trying | Tried | Crowded | PlayingOff | Confirming | Ablating
