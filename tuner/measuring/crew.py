"""A pool of measuring processes: they build in parallel, and one at a time is timed. Does not import torch.

While one is timed, the process groups of all others are stopped (SIGSTOP), so that it has the device and the processors
to itself. The time limits of the others are suspended meanwhile.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from tuner import fault_injection
from tuner.measuring.child_process import COMMAND, Check, Child, disk_full, started
from tuner.measuring.protocol import Job, Limits, Outcome, misfit
from tuner.records import Failure, FailureKind, Phase, Spent

TICK_S = 0.05
TIMING_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of the job with this ticket, and the time it took by phase.

    `alone`: no other child ran beside it at any time, and it had no second process of its own.
    """

    ticket: int
    outcome: Outcome
    spent: Spent
    alone: bool


class Crew(Protocol):
    """Carries out jobs, several at a time."""

    def begin(self, job: Job, limits: Limits) -> int:
        """Starts the job and returns its ticket."""
        ...

    def finished(self, check: Check) -> Finished:
        """Waits until a job has finished. What `check` raises propagates; the jobs go on."""
        ...

    def drop(self) -> None:
        """Kills all running jobs."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Place:
    """A child and its clean-up. `alone`: as in Finished, so far."""

    child: Child
    stack: contextlib.ExitStack
    job: Job | None = None
    alone: bool = True


@dataclass(slots=True)
class Children:
    """The Crew of real processes, all for one workload on one device.

    `spares` idle children are kept that have imported torch already, so that a job starts at once. Leaving the context
    kills all of them. Raises SettingsError for an invalid KITSUNE_CONFINE.
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
            self._refused.append(Finished(ticket, checked(job, disk_full(error)), Spent(), alone=True))
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
        assert self._places, "no job is running"
        while True:
            for ticket, place in self._places.items():
                outcome = place.child.look()
                if outcome is not None:
                    return self._end(ticket, outcome)
            self._pass_the_turn()
            check()
            time.sleep(TICK_S)

    def drop(self) -> None:
        for place in self._places.values():  # all at once: destroying a CUDA context takes seconds
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
        """Starts timing of the next ready child. The others resume when the timed child has answered, but the next one
        is timed only after it has exited."""
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
                disk_full(error)  # raises any other error; the next job will report the full disk
                return

    def _start(self) -> _Place:
        stack = contextlib.ExitStack()
        child = stack.enter_context(started(self.workload, self.device, self.command))
        place = _Place(child, stack)
        if self._timed is not None and not self._places[self._timed].child.has_answered:
            child.halt()
        return place


def within(job: Job, limits: Limits) -> Job:
    """The job with its limits written into it, so that the child can end in time and answer with what it has.

    Call it when the process is given the job: `end_s` counts from now.
    """
    update = {} if limits.total_s is None else {"end_s": time.monotonic() + limits.total_s}
    if job.kind == "measure":
        limit_s = limits.of(Phase.TIMING)
        update["budget_s"] = min(job.budget_s or limit_s, TIMING_SHARE * limit_s)
    return job.model_copy(update=update)


def checked(job: Job, outcome: Outcome) -> Outcome:
    """The outcome if it is a valid answer to this job, else a Failure."""
    if fault_injection.struck("gpu-lost"):
        return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason="CUDA error: device-side assert triggered")
    problem = None if isinstance(outcome, Failure) else misfit(job, outcome)
    if problem is None:
        return outcome
    reason = f"the answer of the measuring process does not fit the question: {problem}"
    return Failure(kind=FailureKind.CRASHED, phase=Phase.TIMING, reason=reason)
