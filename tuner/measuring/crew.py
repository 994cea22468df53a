"""Jobs in, their outcomes out as they come: children build side by side, and one of them is timed at a time.

While one is timed, the process groups of all others are stopped (SIGSTOP), so that what is timed has the device and the
processors for itself. The clocks of their phases stand still too. No torch here.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from tuner.measuring.child_process import COMMAND, Check, Child, no_room, started
from tuner.measuring.measure import checked, within
from tuner.measuring.protocol import Job, Limits, Outcome
from tuner.records import Spent

TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Finished:
    """What the job of this ticket came to, and what its time went to.

    `alone`: no other child was at work beside it, and it had no second process of its own.
    """

    ticket: int
    outcome: Outcome
    spent: Spent
    alone: bool


class Crew(Protocol):
    """Those who carry out jobs, some at a time."""

    def begin(self, job: Job, limits: Limits) -> int:
        """Returns the job's ticket; its child is at work."""
        ...

    def finished(self, check: Check) -> Finished:
        """Waits for the first job that has come to something. What `check` raises propagates; all go on working."""
        ...

    def drop(self) -> None:
        """Ends all that are at work."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Place:
    """A child with all that must be undone when it goes. `alone`: so far."""

    child: Child
    stack: contextlib.ExitStack
    job: Job | None = None
    alone: bool = True


@dataclass(slots=True)
class Children:
    """The Crew of real processes, all for one workload on one device.

    `spares` idle children are kept at hand that have imported torch: a job finds its process ready. As a context
    manager it leaves nothing behind. Raises SettingsError for a KITSUNE_CONFINE that makes no sense.
    """

    workload: str
    device: str
    spares: int = 1
    command: Sequence[str] = COMMAND
    _idle: list[_Place] = field(default_factory=list)
    _places: dict[int, _Place] = field(default_factory=dict)
    _next: int = 0
    _refused: list[Finished] = field(default_factory=list)
    _timed: int | None = None

    def __enter__(self) -> Self:
        self._refill()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, job: Job, limits: Limits) -> int:
        ticket, self._next = self._next, self._next + 1
        try:
            place = self._idle.pop(0) if self._idle else self._start()
        except OSError as error:
            self._refused.append(Finished(ticket, checked(job, no_room(error)), Spent(), alone=True))
            return ticket
        place.job = within(job, limits)
        self._places[ticket] = place
        place.alone = len(self._places) == 1 and not job.ahead
        for other in self._places.values():
            other.alone = other.alone and len(self._places) == 1
        place.child.give(place.job, limits)
        self._refill()
        return ticket

    def finished(self, check: Check) -> Finished:
        if self._refused:
            return self._refused.pop(0)
        assert self._places, "nobody is at work"
        while True:
            for ticket, place in self._places.items():
                outcome = place.child.look(0)
                if outcome is not None:
                    return self._end(ticket, outcome)
            self._pass_the_turn()
            check()
            time.sleep(TICK_S)

    def drop(self) -> None:
        for place in self._places.values():  # all at once: a CUDA context takes seconds to go
            place.child.kill()
        for place in self._places.values():
            place.stack.close()
        self._places.clear()
        self._refused.clear()
        self._timed = None
        self._resume()

    def close(self) -> None:
        for place in self._idle:
            place.child.kill()
        self.drop()
        for place in self._idle:
            place.stack.close()
        self._idle.clear()

    def _end(self, ticket: int, outcome: Outcome) -> Finished:
        place = self._places.pop(ticket)
        assert place.job is not None
        place.stack.close()
        if self._timed == ticket:
            self._timed = None
            self._resume()
        answer = place.child.hang or checked(place.job, outcome)
        return Finished(ticket, answer, place.child.spent(), place.alone)

    def _pass_the_turn(self) -> None:
        """A child that has answered lets the others go on, but only when it has left may the next be timed."""
        if self._timed is not None:
            if self._places[self._timed].child.has_answered:
                self._resume()
            return
        ready = next((ticket for ticket, place in self._places.items() if place.child.is_ready), None)
        if ready is None:
            return
        self._timed = ready
        for place in (*self._idle, *self._places.values()):
            if place is not self._places[ready]:
                place.child.halt()
        self._places[ready].child.go()

    def _resume(self) -> None:
        for place in (*self._idle, *self._places.values()):
            place.child.resume()

    def _refill(self) -> None:
        while len(self._idle) < self.spares:
            try:
                self._idle.append(self._start())
            except OSError as error:
                no_room(error)  # the next job will be told
                return

    def _start(self) -> _Place:
        stack = contextlib.ExitStack()
        child = stack.enter_context(started(self.workload, self.device, self.command))
        place = _Place(child, stack)
        if self._timed is not None and not self._places[self._timed].child.has_answered:
            child.halt()
        return place
