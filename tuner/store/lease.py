"""The fence: writes that happen only while the writer still owns its run, checked in the very statement that writes.

A claim raises the run's `attempt`; (run id, attempt) is the fencing token (M. Kleppmann, "How to do distributed
locking", 2016). A worker that slept through its lease is refused even when its clock says otherwise: the clock only
decides when a take-over may begin, never who may write. That it may begin a `Vigil` confirms, without that clock.
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
from tuner.store.rows import from_row

#: A living worker beats every 2 s. Clocks that jump, and machines that wake up, make its lease look ended for so long.
SETTLE_S: Final = 5.0
#: A heartbeat that is so far ahead of now is from before the clock was set back.
AHEAD: Final = timedelta(seconds=60)

_runs = tables.runs


class Vigil:
    """Runs that look abandoned, as one process has watched them by its own monotonic clock.

    No wall clock has a say in it: a run whose heartbeat has not moved for `settle_s` has no living worker.
    """

    def __init__(self, settle_s: float = SETTLE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s = settle_s
        self._clock = clock
        self._since: dict[tuple[str, int, datetime | None], float] = {}

    @property
    def is_kept(self) -> bool:
        """Whether any run looked abandoned at the last look."""
        return bool(self._since)

    def settled(self, connection: Connection, at: Instant) -> list[str]:
        """Looks once more; the ids of the runs that have stayed as they were for long enough."""
        now = self._clock()
        seen = connection.execute(select(_runs.c.id, _runs.c.attempt, _runs.c.heartbeat_at).where(is_abandoned(at)))
        self._since = {key: self._since.get(key, now) for key in map(tuple, seen)}
        return [key[0] for key, since in self._since.items() if now - since >= self._settle_s]


def try_update(connection: Connection, run: Run, **changes: Any) -> Run | None:
    """Changes columns of the run that `run` claimed; returns it as it now stands, or None when the claim is void."""
    statement = update(_runs).where(_held_by(run)).values(**changes).returning(_runs)
    row = connection.execute(statement).one_or_none()
    return None if row is None else from_row(Run, _runs, row)


def update_if_held(connection: Connection, run: Run, **changes: Any) -> Run:
    """As `try_update`, but raises LeaseLostError when the claim is void."""
    changed = try_update(connection, run, **changes)
    if changed is None:
        raise lost(connection, run)
    return changed


def insert_if_held(connection: Connection, run: Run, table: Table, values: dict[str, Any]) -> bool:
    """Inserts a row unless its key is there already (then False). Raises LeaseLostError.

    FOR NO KEY UPDATE keeps a rival's claim from slipping in between the check and the commit on PostgreSQL; SQLite has
    one writer at a time anyway, and SQLAlchemy leaves the clause out there.
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
    """Why the token of `run` is no longer good, in words."""
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
    """Running, and its lease has ended, or is from before the clock was set back; `settled`: and it is one of them."""
    watched = [] if settled is None else [_runs.c.id.in_(settled)]
    is_over = or_(_runs.c.lease_until < now, _runs.c.heartbeat_at > now + AHEAD)
    return and_(_runs.c.status == RunStatus.RUNNING, is_over, *watched)


def is_in_vain(now: Instant, settled: Collection[str] | None, most: int) -> ColumnElement[bool]:
    """So many deaths in a row, the last one just now, or of a GPU, whose worker has put the run back."""
    in_queue = and_(_runs.c.status == RunStatus.QUEUED, _runs.c.deaths >= most)
    return or_(in_queue, and_(is_abandoned(now, settled), _runs.c.deaths + 1 >= most))


def _held_by(run: Run) -> ColumnElement[bool]:
    return and_(_runs.c.id == run.id, _runs.c.attempt == run.attempt, _runs.c.status == RunStatus.RUNNING)
