"""Leases and fencing: a worker can write to a run only while it holds it, checked in the same statement as the write.

Each claim increments the run's `attempt`; (run id, attempt) is the fencing token (M. Kleppmann, "How to do distributed
locking", 2016). A worker that slept through its lease is refused whatever its clock says: clocks only decide when a
take-over may begin, never who may write. A `Vigil` confirms by a monotonic clock that it may begin.
"""

import time
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, and_, literal, or_, select, update

from kitsune.errors import LeaseLostError
from tuner.records import Run, RunStatus
from tuner.store import tables
from tuner.store.insert_once import insert_selected
from tuner.store.moments import Instant
from tuner.store.rows import only_record

#: A living worker sends a heartbeat every 2 s, so a lease that only looks expired (the clock jumped, or the machine
#: woke up) is renewed within this time.
SETTLE_S: Final = 5.0
#: A heartbeat this far in the future was written before the clock was set back.
AHEAD: Final = timedelta(seconds=60)

_runs = tables.runs


class Vigil:
    """Watches runs that look abandoned, by the monotonic clock of this process.

    A run whose heartbeat has not changed for `settle_s` has no living worker, independent of any wall clock.
    """

    def __init__(self, settle_s: float = SETTLE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s = settle_s
        self._clock = clock
        self._since: dict[tuple[str, int, datetime | None], float] = {}

    @property
    def is_kept(self) -> bool:
        """Whether any run looked abandoned at the last check."""
        return bool(self._since)

    def settled(self, connection: Connection, at: Instant) -> list[str]:
        """Checks again; returns the ids of the runs that have not changed for `settle_s`."""
        now = self._clock()
        seen = connection.execute(select(_runs.c.id, _runs.c.attempt, _runs.c.heartbeat_at).where(is_abandoned(at)))
        self._since = {key: self._since.get(key, now) for key in map(tuple, seen)}
        return [key[0] for key, since in self._since.items() if now - since >= self._settle_s]


def try_update(connection: Connection, run: Run, **changes: Any) -> Run | None:
    """Updates columns of the claimed run; returns the updated run, or None when the claim no longer holds."""
    statement = update(_runs).where(_held_by(run)).values(**changes).returning(_runs)
    return only_record(Run, _runs, connection.execute(statement))


def update_if_held(connection: Connection, run: Run, **changes: Any) -> Run:
    """Like `try_update`, but raises LeaseLostError when the claim no longer holds."""
    changed = try_update(connection, run, **changes)
    if changed is None:
        raise lost(connection, run)
    return changed


def insert_if_held(connection: Connection, run: Run, table: Table, values: dict[str, Any]) -> bool:
    """Inserts a row unless its key exists (then False). Raises LeaseLostError when the claim no longer holds.

    On PostgreSQL, FOR NO KEY UPDATE prevents another claim between the check and the commit. SQLite has one writer at a
    time, and SQLAlchemy omits the clause there.
    """
    chosen = (
        select(*(literal(value, table.c[name].type) for name, value in values.items()))
        .select_from(_runs)
        .where(_held_by(run))
        .with_for_update(key_share=True, of=_runs)
    )
    if insert_selected(connection, table, list(values), chosen):
        return True
    if connection.scalar(select(_runs.c.id).where(_held_by(run))) is None:
        raise lost(connection, run)
    return False


def lost(connection: Connection, run: Run) -> LeaseLostError:
    """The error that says why the fencing token of `run` is no longer valid."""
    row = connection.execute(
        select(_runs.c.status, _runs.c.attempt, _runs.c.worker).where(_runs.c.id == run.id)
    ).one_or_none()
    if row is None:
        why = "the database holds no such run"
    elif row.attempt != run.attempt:
        why = f"attempt {row.attempt} (worker {row.worker}) took it over after the lease expired"
    else:
        why = f"it is {row.status} now"
    return LeaseLostError(f"run {run.id}, attempt {run.attempt}: {why}; nothing was written, stop working on this run")


def is_claimable(now: Instant, settled: Collection[str] | None = None) -> ColumnElement[bool]:
    """Queued, or running under a lease that expired."""
    return (_runs.c.status == RunStatus.QUEUED) | is_abandoned(now, settled)


def is_abandoned(now: Instant, settled: Collection[str] | None = None) -> ColumnElement[bool]:
    """Running with an expired lease, or with one from before the clock was set back. `settled`: only these ids."""
    watched = [] if settled is None else [_runs.c.id.in_(settled)]
    is_over = or_(_runs.c.lease_until < now, _runs.c.heartbeat_at > now + AHEAD)
    return and_(_runs.c.status == RunStatus.RUNNING, is_over, *watched)


def is_in_vain(now: Instant, settled: Collection[str] | None, most: int) -> ColumnElement[bool]:
    """At least `most` deaths in a row: counting the current lost worker, or queued after a broken GPU."""
    in_queue = and_(_runs.c.status == RunStatus.QUEUED, _runs.c.deaths >= most)
    return or_(in_queue, and_(is_abandoned(now, settled), _runs.c.deaths + 1 >= most))


def _held_by(run: Run) -> ColumnElement[bool]:
    return and_(_runs.c.id == run.id, _runs.c.attempt == run.attempt, _runs.c.status == RunStatus.RUNNING)
