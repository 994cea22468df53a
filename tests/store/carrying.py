"""Runs carried out on a made-up machine: claiming them, and what may happen meanwhile."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from sqlalchemy import text, update

from tests.store.samples import a_run
from tests.unit.tuner.machine import Machine
from tuner.records import Run, Source, Trial
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import runs, trials
from tuner.tuning.confirmation import Conclusion
from tuner.tuning.events import Event, Tried, Trying
from tuner.wall_clock import utcnow
from tuner.worker.run_execution import carry_out

PATIENCE_S = 60.0


def claimed(database: Database, **changes: object) -> Run:
    run = a_run(**{"device": "cpu", "budget_trials": 6, **changes})
    with database.begin() as connection:
        runs.add(connection, run)
        mine = runs.claim_one(connection, run.id, "w")
    assert mine is not None
    return mine


def carried_out(
    database: Database, run: Run, machine: Machine, tell: Callable[[Event], object] = lambda _: None, **changes: Any
) -> tuple[Run, Conclusion]:
    return carry_out(database, run, partial(machine.make, spec=run.workload), tell, **changes)


def stored(database: Database, run: Run) -> tuple[Run, list[Trial]]:
    with database.read() as connection:
        found = runs.get(connection, run.id)
        assert found is not None
        return found, trials.list_of(connection, run.id)


def on_trial(number: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """A `tell` that acts when the trial of this number begins."""

    def tell(event: Event) -> None:
        if isinstance(event, Trying) and event.number == number:
            act()

    return tell


def on_confirmed(number: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """A `tell` that acts when so many processes have confirmed the best."""
    told = count(1)

    def tell(event: Event) -> None:
        if isinstance(event, Tried) and event.trial.source is Source.CONFIRM and next(told) == number:
            act()

    return tell


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def cancel(database: Database, run: Run) -> None:
    with database.begin() as connection:
        assert runs.cancel(connection, run.id) is not None


def taken_over(database: Database, run: Run) -> Run:
    """The run as another worker claims it, after its lease."""
    ended = update(tables.runs).where(tables.runs.c.id == run.id).values(lease_until=utcnow() - timedelta(seconds=1))
    with database.begin() as connection:
        connection.execute(ended)
        heir = runs.claim_one(connection, run.id, "heir")
    assert heir is not None
    return heir


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Nobody else can write to the tables."""
    with open_database(url) as rival, rival.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE kitsune_runs, kitsune_trials IN ACCESS EXCLUSIVE MODE"))
        yield
