"""Events of a tuning run.

Order: Started, Inspected, (Trying, Tried) for each trial, of which several may run at once, (Confirming, Tried for each
process), then Explaining twice at most and (Ablating, Tried) for each process. Recalled precedes a confirmation without
a search before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kitsune.knobs import Choice
from tuner.measuring.protocol import Inspection
from tuner.records import Run, Trial
from tuner.search.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Started:
    """The run is stored and claimed by this worker."""

    run: Run


@dataclass(frozen=True, slots=True)
class Inspected:
    """The workload was run once as given."""

    inspection: Inspection


@dataclass(frozen=True, slots=True)
class Budgeted:
    """No budget was given, so one was derived from the inspection; `words` is the message for the user."""

    budget_s: float
    words: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """An earlier run has confirmed a plan for the same step here: it is measured again instead of a search."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Trying:
    """A trial begins; `total` is None when the budget is time. No Tried follows when the user interrupts it.

    `number` is its expected number: the one it gets if running trials end in the order in which they began.
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
    """A process ran out of memory beside others. Its choices are measured again with fewer processes in parallel."""

    knobs: Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class PlayingOff:
    """The search has ended; the best candidates are measured against each other in one process."""

    contenders: tuple[Mapping[str, Choice], ...]


@dataclass(frozen=True, slots=True)
class Confirming:
    """These choices are measured again in fresh processes; only those samples are published.

    Sent once for each confirmation: another one follows when a confirmation failed and the next best is confirmed.
    """

    knobs: Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Explaining:
    """The plan is stored; the launches of a step with these choices are now recorded."""

    knobs: Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Ablating:
    """The plan is stored; it is now measured against itself without each of these knobs.

    No Tried follows when the user interrupts it.
    """

    left_out: tuple[str, ...]


Event = (
    Started
    | Inspected
    | Budgeted
    | Recalled
    | Trying
    | Tried
    | Crowded
    | PlayingOff
    | Confirming
    | Explaining
    | Ablating
)
