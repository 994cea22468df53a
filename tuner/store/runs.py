"""Runs: the queue and its history. Every function takes a connection and gives records; the caller commits.

Time is an argument (`now`, by default this process's UTC clock), so that tests use a clock of their own and never
sleep. Clocks of several machines may differ: skew makes a take-over begin earlier or later by as much, and the fence
(`tuner/store/lease.py`) keeps even that harmless. Keep clocks together within a fraction of a lease.
"""

import base64
import binascii
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Update, func, insert, or_, select, tuple_, update

from kitsune.errors import StoreError
from kitsune.plan import Environment, Plan
from kitsune.record import Record
from tuner.records import Run, RunStatus, Verdict
from tuner.store import plans, tables
from tuner.store.lease import is_abandoned, is_claimable, lost, try_update, update_if_held
from tuner.store.rows import from_row, to_row, utcnow

#: A worker renews at a third of it; a worker that died is replaced after it.
LEASE_S = 60.0
#: So many workers may vanish while they hold a run before the run is taken for the cause.
MAX_ATTEMPTS = 3
#: A model in the memory of the process that tunes it: no other process can take it over.
LIVE = "live"

_runs = tables.runs


class Page(Record):
    """Some runs, newest first; `after` is the cursor of the next page, None on the last."""

    runs: tuple[Run, ...]
    after: str | None


def add(connection: Connection, run: Run) -> Run:
    """Stores a new run as it is. Raises StoreError when its id is taken."""
    gpu = run.environment.gpu if run.environment else None
    connection.execute(insert(_runs).values(to_row(run, gpu=gpu)))
    return run


def get(connection: Connection, run_id: str) -> Run | None:
    row = connection.execute(select(_runs).where(_runs.c.id == run_id)).one_or_none()
    return None if row is None else from_row(Run, _runs, row)


def page(
    connection: Connection,
    *,
    status: RunStatus | None = None,
    fingerprint: str | None = None,
    gpu: str | None = None,
    workload: str | None = None,
    verdict: Verdict | None = None,
    after: str | None = None,
    limit: int = 50,
) -> Page:
    """Up to `limit` (>= 1) runs that match every filter, newest first, beginning after the cursor.

    A cursor names a place by (created_at, id), so runs that arrive meanwhile shift nothing. Raises StoreError for a
    cursor that is not ours.
    """
    filters = {"status": status, "fingerprint": fingerprint, "gpu": gpu, "workload": workload, "verdict": verdict}
    statement = select(_runs).where(*(_runs.c[name] == value for name, value in filters.items() if value is not None))
    if after is not None:
        created_at, run_id = _place(after)
        here = tuple_(_runs.c.created_at, _runs.c.id, types=(_runs.c.created_at.type, _runs.c.id.type))
        statement = statement.where(here < (created_at, run_id))
    ordered = statement.order_by(_runs.c.created_at.desc(), _runs.c.id.desc()).limit(limit + 1)
    found = [from_row(Run, _runs, row) for row in connection.execute(ordered)]
    return Page(runs=tuple(found[:limit]), after=_cursor(found[limit - 1]) if len(found) > limit else None)


def claim(
    connection: Connection,
    worker: str,
    *,
    lease_s: float = LEASE_S,
    max_attempts: int = MAX_ATTEMPTS,
    now: datetime | None = None,
) -> Run | None:
    """The oldest run that is queued or whose worker vanished, now owned by `worker`; None when there is none.

    One conditional UPDATE. `= (scalar subquery)`, not IN: PostgreSQL may run the subquery of IN again and claim more
    than one. Rivals skip locked rows instead of waiting for each other.
    """
    at = now or utcnow()
    fail_abandoned(connection, max_attempts=max_attempts, now=at)
    oldest = (
        select(_runs.c.id)
        .where(is_claimable(at))
        .order_by(_runs.c.created_at, _runs.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    return _taken(connection, update(_runs).where(_runs.c.id == oldest.scalar_subquery()), worker, lease_s, at)


def claim_one(
    connection: Connection, run_id: str, worker: str, *, lease_s: float = LEASE_S, now: datetime | None = None
) -> Run | None:
    """This very run, if it is queued or its worker vanished; else None. A local run claims its own."""
    at = now or utcnow()
    return _taken(connection, update(_runs).where(_runs.c.id == run_id, is_claimable(at)), worker, lease_s, at)


def fail_abandoned(connection: Connection, *, max_attempts: int = MAX_ATTEMPTS, now: datetime | None = None) -> int:
    """Ends runs whose worker vanished and that nobody should take over; returns how many.

    A run that `max_attempts` workers did not survive would take down the next one too; a live model is gone with its
    process.
    """
    at = now or utcnow()
    error = "the worker vanished before the run had ended; read the worker's log, then start the run again"
    ended = (
        update(_runs)
        .where(is_abandoned(at), or_(_runs.c.attempt >= max_attempts, _runs.c.workload == LIVE))
        .values(status=RunStatus.FAILED, error=error, finished_at=at, lease_until=None)
        .returning(_runs.c.id)
    )
    return len(connection.execute(ended).all())


def heartbeat(connection: Connection, run: Run, *, lease_s: float = LEASE_S, now: datetime | None = None) -> Run:
    """Extends the lease and returns the run as it stands.

    A run that was cancelled meanwhile comes back as such, with nothing extended: the worker stops. Raises
    LeaseLostError when the run is another worker's or has ended.
    """
    at = now or utcnow()
    extended = try_update(connection, run, heartbeat_at=at, lease_until=at + timedelta(seconds=lease_s))
    if extended is not None:
        return extended
    current = get(connection, run.id)
    if current is None or current.attempt != run.attempt or current.status is not RunStatus.CANCELLED:
        raise lost(connection, run)
    return current


def note_inspection(
    connection: Connection, run: Run, *, fingerprint: str, environment: Environment, inapplicable: dict[str, str]
) -> Run:
    """Writes down what looking at the workload on this machine told. Raises LeaseLostError."""
    return update_if_held(
        connection,
        run,
        fingerprint=fingerprint,
        environment=environment,
        gpu=environment.gpu,
        inapplicable=inapplicable,
    )


def release(connection: Connection, run: Run) -> Run:
    """Puts the run back into the queue for anybody. Raises LeaseLostError."""
    return update_if_held(connection, run, status=RunStatus.QUEUED, worker=None, heartbeat_at=None, lease_until=None)


def finish(
    connection: Connection,
    run: Run,
    *,
    plan: Plan | None = None,
    verdict: Verdict | None = None,
    now: datetime | None = None,
) -> Run:
    """Ends the run well, and stores its plan if it has one. Raises LeaseLostError, and then stores neither."""
    at = now or utcnow()
    if plan is not None:
        plans.put(connection, plan, run, now=at)
    return _ended(connection, run, at, RunStatus.FINISHED, plan_id=plan.plan_id if plan else None, verdict=verdict)


def fail(connection: Connection, run: Run, error: str, *, now: datetime | None = None) -> Run:
    """Ends the run with the reason why it has no result. Raises LeaseLostError."""
    return _ended(
        connection, run, now or utcnow(), RunStatus.FAILED, error=error.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    )


def cancel(connection: Connection, run_id: str, *, now: datetime | None = None) -> Run | None:
    """Ends a queued or running run, whoever owns it; one that has ended stays as it is. None when there is no such run.

    Its worker learns of it from its next heartbeat, and can write nothing more.
    """
    ended = (
        update(_runs)
        .where(_runs.c.id == run_id, _runs.c.status.in_((RunStatus.QUEUED, RunStatus.RUNNING)))
        .values(status=RunStatus.CANCELLED, finished_at=now or utcnow(), lease_until=None)
        .returning(_runs)
    )
    row = connection.execute(ended).one_or_none()
    return get(connection, run_id) if row is None else from_row(Run, _runs, row)


def _taken(connection: Connection, statement: Update, worker: str, lease_s: float, at: datetime) -> Run | None:
    row = connection.execute(
        statement.values(
            status=RunStatus.RUNNING,
            worker=worker,
            attempt=_runs.c.attempt + 1,
            started_at=func.coalesce(_runs.c.started_at, at, type_=_runs.c.started_at.type),
            heartbeat_at=at,
            lease_until=at + timedelta(seconds=lease_s),
        ).returning(_runs)
    ).one_or_none()
    return None if row is None else from_row(Run, _runs, row)


def _ended(connection: Connection, run: Run, at: datetime, status: RunStatus, **changes: Any) -> Run:
    return update_if_held(connection, run, status=status, finished_at=at, lease_until=None, **changes)


def _cursor(run: Run) -> str:
    return base64.urlsafe_b64encode(f"{run.created_at.isoformat()} {run.id}".encode()).decode()


def _place(cursor: str) -> tuple[datetime, str]:
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
        moment, _, run_id = text.partition(" ")
        created_at = datetime.fromisoformat(moment)
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"{cursor!r:.100} is not a cursor of a page; begin again without one") from error
    if created_at.tzinfo is None or "\x00" in run_id:
        raise StoreError(f"{cursor!r:.100} is not a cursor of a page; begin again without one")
    return created_at, run_id
