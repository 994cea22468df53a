"""The fence: writes that happen only while the writer still owns its run, checked in the very statement that writes.

A claim raises the run's `attempt`; (run id, attempt) is the fencing token (M. Kleppmann, "How to do distributed
locking", 2016). A worker that slept through its lease is refused even when its clock says otherwise: the clock only
decides when a take-over may begin, never who may write.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, literal, select, update

from kitsune.errors import LeaseLostError
from tuner.records import Run, RunStatus
from tuner.store import tables
from tuner.store.once import insert_selected
from tuner.store.rows import from_row

_runs = tables.runs


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


def is_claimable(now: datetime) -> ColumnElement[bool]:
    """Queued, or running under a lease that expired."""
    return (_runs.c.status == RunStatus.QUEUED) | is_abandoned(now)


def is_abandoned(now: datetime) -> ColumnElement[bool]:
    return and_(_runs.c.status == RunStatus.RUNNING, _runs.c.lease_until < now)


def _held_by(run: Run) -> ColumnElement[bool]:
    return and_(_runs.c.id == run.id, _runs.c.attempt == run.attempt, _runs.c.status == RunStatus.RUNNING)
