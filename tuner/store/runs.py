"""Runs: the queue and its history. Every function takes a connection and gives records; the caller commits.

Time is an argument (`now`, by default this process's UTC clock), so that tests use a clock of their own and never
sleep. Clocks of several machines may differ: skew makes a take-over begin earlier or later by as much, and the fence
(`tuner/store/lease.py`) keeps even that harmless. Keep clocks together within a fraction of a lease.
"""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Update, and_, func, insert, not_, or_, select, tuple_, update

from kitsune.errors import CursorError
from kitsune.plan import Environment, Plan
from kitsune.record import Record
from tuner.records import Run, RunStatus, Verdict
from tuner.store import plans, tables
from tuner.store.lease import is_abandoned, is_claimable, lost, try_update, update_if_held
from tuner.store.rows import from_row, to_row, utcnow

#: A worker that died is replaced after it; a living one renews it every 2 s, or at a third of it.
LEASE_S = 60.0
#: So many workers in a row may vanish before they store a trial of a run; then the run is taken for the cause.
MAX_ATTEMPTS = 3
#: A model in the memory of the process that tunes it: no other process can take it over.
LIVE = "live"
#: An archive that the database holds, see `Run.archive`: any worker can do it.
ARCHIVE = "archive"
#: How the name of a workload begins that every installation has.
ZOO = "zoo:"

_runs = tables.runs
_trials = tables.trials


class Page(Record):
    """Some runs, newest first; `after` is the cursor of the next page, None on the last."""

    runs: tuple[Run, ...]
    after: str | None


def add(connection: Connection, run: Run, *, content: str | None = None) -> Run:
    """Stores a new run as it is. Raises StoreError when its id is taken.

    `content` is the digest of the request that it answers, by which a submit finds it.
    """
    gpu = run.environment.gpu if run.environment else None
    connection.execute(insert(_runs).values(to_row(run, gpu=gpu, content=content)))
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

    A cursor names a place by (created_at, id), so runs that arrive meanwhile shift nothing. Raises CursorError for a
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


def count(connection: Connection) -> Mapping[RunStatus, int]:
    """How many runs stand so, for every status."""
    rows = connection.execute(select(_runs.c.status, func.count()).group_by(_runs.c.status)).all()
    found: dict[str, int] = {row[0]: row[1] for row in rows}
    return {status: found.get(status, 0) for status in RunStatus}


def claim(
    connection: Connection,
    worker: str,
    *,
    device: str,
    gpu: str | None = None,
    lease_s: float = LEASE_S,
    max_attempts: int = MAX_ATTEMPTS,
    now: datetime | None = None,
) -> Run | None:
    """The oldest run for such a worker that is queued or whose worker vanished, now its own; None when there is none.

    `device` is the worker's ("cuda:1", "cpu"): it takes runs for any device or for its kind, and the run then names it.
    With `gpu`, the model that it is, a run that was begun on another one is left for its like: its trials were measured
    there.
    Only data is taken, an archive or a name of the zoo: never a live model, nor code in somebody's file.

    One conditional UPDATE. `= (scalar subquery)`, not IN: PostgreSQL may run the subquery of IN again and claim more
    than one. Rivals skip locked rows instead of waiting for each other.
    """
    at = now or utcnow()
    fail_abandoned(connection, max_attempts=max_attempts, now=at)
    oldest = (
        select(_runs.c.id)
        .where(is_claimable(at), _is_data(), _suits(device, gpu))
        .order_by(_runs.c.created_at, _runs.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    statement = update(_runs).where(_runs.c.id == oldest.scalar_subquery()).values(device=device)
    return _taken(connection, statement, worker, lease_s, at)


def claim_one(
    connection: Connection, run_id: str, worker: str, *, lease_s: float = LEASE_S, now: datetime | None = None
) -> Run | None:
    """This very run, if it is queued or its worker vanished; else None. A local run claims its own."""
    at = now or utcnow()
    return _taken(connection, update(_runs).where(_runs.c.id == run_id, is_claimable(at)), worker, lease_s, at)


def fail_abandoned(connection: Connection, *, max_attempts: int = MAX_ATTEMPTS, now: datetime | None = None) -> int:
    """Ends runs whose worker vanished and that nobody takes over; returns how many.

    A run that `max_attempts` workers in a row did not survive, and without one more trial, would take down the next one
    too; a live model is gone with its process, and the code of a local run is nobody else's to start.
    """
    at = now or utcnow()
    last = select(func.max(_trials.c.attempt)).where(_trials.c.run_id == _runs.c.id).scalar_subquery()
    in_vain = _runs.c.attempt - func.coalesce(last, 0)
    error = "the worker vanished before the run had ended; read the worker's log, then start the run again"
    ended = (
        update(_runs)
        .where(is_abandoned(at), or_(in_vain >= max_attempts, not_(_is_data())))
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


def _is_data() -> ColumnElement[bool]:
    """Runs that need nothing of the machine where they were asked for."""
    is_archive = and_(_runs.c.workload == ARCHIVE, _runs.c.archive.is_not(None))
    return or_(is_archive, _begins(_runs.c.workload, ZOO))


def _suits(device: str, gpu: str | None) -> ColumnElement[bool]:
    kind = device.partition(":")[0]
    is_of_kind = or_(_runs.c.device.in_(("", kind)), _begins(_runs.c.device, f"{kind}:"))
    return is_of_kind if gpu is None else and_(is_of_kind, or_(_runs.c.gpu.is_(None), _runs.c.gpu == gpu))


def _begins(column: ColumnElement[str], word: str) -> ColumnElement[bool]:
    """Not LIKE, to which on SQLite "ZOO:" is "zoo:": a file of code may lie in a folder of that name."""
    return func.substr(column, 1, len(word)) == word


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
        is_ours = created_at.tzinfo is not None and "\x00" not in run_id
        created_at = created_at.astimezone(UTC)
    except (binascii.Error, ValueError, OverflowError) as error:
        raise CursorError(f"{cursor!r:.100} is not a cursor of a page; begin again without one") from error
    if not is_ours:
        raise CursorError(f"{cursor!r:.100} is not a cursor of a page; begin again without one")
    return created_at, run_id
