"""Runs: the queue and its history. Functions take a connection and return records; the caller commits.

Time is an argument (`now`, by default the database's clock, see `tuner/store/moments.py`), so that tests can set it and
never sleep. Fencing tokens decide who may write (`tuner/store/lease.py`), whatever the clocks say.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Unpack

from sqlalchemy import ColumnElement, Connection, Update, and_, case, func, insert, not_, or_, select, update

from kitsune.base.base_record import Record
from kitsune.base.text_format import clean
from kitsune.plan import Environment, Evidence, Plan
from tuner.records import Run, RunStatus, Verdict
from tuner.store import tables
from tuner.store.filters import Filters, conditions
from tuner.store.lease import Vigil, is_abandoned, is_claimable, is_in_vain, lost, try_update, update_if_held
from tuner.store.moments import Instant, current
from tuner.store.paging import Order, rows_after
from tuner.store.queries import plans
from tuner.store.rows import from_row, only_record, to_row

#: A run is taken over when its lease has expired; a living worker renews it every 2 s, or after a third of it.
LEASE_S = 60.0
#: If this many workers in a row vanish without storing a trial, not even one given up, the run is the cause.
MAX_DEATHS = 10
#: Workload of a run on a model in the memory of its process; no other process can take it over.
LIVE = "live"
#: Workload of a run on an archive in the database (`Run.archive`); any worker can carry it out.
ARCHIVE = "archive"
#: Prefix of workloads that every installation has.
ZOO = "zoo:"
#: Number of characters of a digest that are shown.
SHORT: Final = 12

UNFINISHED: Final = tuple(status for status in RunStatus if not status.is_finished)
ENDED: Final = tuple(status for status in RunStatus if status.is_finished)

_runs = tables.runs


class Sort(StrEnum):
    """Sort keys of a list of runs. Runs without a value come last in both directions."""

    CREATED = "created"
    NAME = "name"  #: the label in lists
    GAIN = "gain"  #: of the plan over the best stock configuration
    INTERVAL = "interval"  #: low end of the gain's interval
    MEMORY = "memory"  #: peak memory of the plan, relative to the best stock configuration
    VERDICT = "verdict"
    TRIALS = "trials"
    GPU = "gpu"
    STATUS = "status"


_COLUMNS: Final[Mapping[Sort, str]] = {
    Sort.CREATED: "created_at",
    Sort.NAME: "label",
    Sort.INTERVAL: "gain_low",
    Sort.MEMORY: "memory_ratio",
}


class Page(Record):
    """A page of a sorted list of runs; `after` is the cursor of the next page, None on the last."""

    runs: tuple[Run, ...]
    after: str | None


def add(connection: Connection, run: Run, *, content: str | None = None, owner: str | None = None) -> Run:
    """Stores a new run. Raises StoreError when its id is taken.

    `content`: digest of its request, by which a repeated submit finds it. `owner`: who sent the request.
    """
    derived = {
        "label": label_of(run).casefold(),
        "gpu": run.environment.gpu if run.environment else None,
        "gain": run.speedup.median if run.speedup else None,
        "gain_low": run.speedup.low if run.speedup else None,
    }
    connection.execute(insert(_runs).values(to_row(run, content=content, owner=owner, **derived)))
    return run


def get(connection: Connection, run_id: str, *, team: str | None = None) -> Run | None:
    """The run if it belongs to this team; `team` None means any team, as for workers."""
    return only_record(Run, _runs, connection.execute(select(_runs).where(is_of(run_id, team))))


def get_all(connection: Connection, run_ids: Sequence[str], *, team: str | None = None) -> dict[str, Run]:
    """Like `get` for several runs: id -> run. Missing ones are left out."""
    rows = connection.execute(select(_runs).where(_runs.c.id.in_(run_ids), *tables.of_team(_runs, team)))
    return {row.id: from_row(Run, _runs, row) for row in rows}


def page(
    connection: Connection,
    *,
    team: str | None = None,
    sort: Sort = Sort.CREATED,
    is_descending: bool = True,
    after: str | None = None,
    limit: int = 50,
    now: datetime | None = None,
    **filters: Unpack[Filters],
) -> Page:
    """Up to `limit` (>= 1) runs that match every filter, in this order, starting after the cursor.

    Raises CursorError for an invalid cursor, or one of a list in another order.
    """
    is_listed = conditions(filters, now or current(connection))
    statement = select(_runs).where(*tables.of_team(_runs, team), *is_listed)
    order = Order(_runs.c[_COLUMNS.get(sort, sort.value)], _runs.c.id, is_descending)
    rows, end = rows_after(connection, statement, order, after, limit)
    return Page(runs=tuple(from_row(Run, _runs, row) for row in rows), after=end)


def count(connection: Connection, *, team: str | None = None) -> Mapping[RunStatus, int]:
    """The number of runs in each status, of this team or (None) of all teams."""
    statement = select(_runs.c.status, func.count()).where(*tables.of_team(_runs, team)).group_by(_runs.c.status)
    rows = connection.execute(statement).all()
    found: dict[str, int] = {row[0]: row[1] for row in rows}
    return {status: found.get(status, 0) for status in RunStatus}


def count_lost(connection: Connection, *, team: str, now: datetime | None = None) -> int:
    """How many of the team's running runs have lost their worker."""
    statement = select(func.count()).where(_runs.c.team == team, is_abandoned(now or current(connection)))
    return connection.scalar(statement) or 0


def label_of(run: Run) -> str:
    """The label of a run in lists: its name, or a description of the workload.

    Bidirectional control characters are removed.
    """
    return clean(run.name or _named_by_itself(run))


def _named_by_itself(run: Run) -> str:
    if run.workload.startswith(ZOO):
        name, _, options = run.workload.removeprefix(ZOO).partition("?")
        return f"{name} ({options.replace('&', ', ').replace('=', ' ')})" if options else name
    if run.workload == ARCHIVE:
        return f"a submitted model ({(run.archive or run.fingerprint)[:SHORT]})"
    return "a live model" if run.workload == LIVE else run.workload


def claim(
    connection: Connection,
    worker: str,
    *,
    device: str,
    gpu: str | None = None,
    lease_s: float = LEASE_S,
    vigil: Vigil | None = None,
    max_deaths: int = MAX_DEATHS,
    now: datetime | None = None,
) -> Run | None:
    """Claims the oldest run that is queued or whose worker vanished and that suits this worker; None if there is none.

    `device`: the worker's device ("cuda:1", "cpu"). It takes runs for any device or for its kind; the run then records
    it. `gpu`: the GPU model; runs with trials from another model are not taken.
    Only runs on an archive or a zoo workload are taken, never a live model or code in a user's file.
    `vigil`: a run whose worker vanished is taken over only after the vigil has confirmed it.

    One conditional UPDATE with `= (scalar subquery)`, not IN: PostgreSQL may evaluate the subquery of IN again and
    claim more than one run. Concurrent claims skip locked rows instead of waiting.
    """
    at = now or current(connection)
    settled = None if vigil is None else vigil.settled(connection, at)
    fail_abandoned(connection, settled, max_deaths=max_deaths, now=at)
    oldest = (
        select(_runs.c.id)
        .where(is_claimable(at, settled), is_data(), _suits(device, gpu))
        .order_by(_runs.c.created_at, _runs.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    statement = update(_runs).where(_runs.c.id == oldest.scalar_subquery()).values(device=device)
    return _taken(connection, statement, worker, lease_s, at)


def claim_one(
    connection: Connection, run_id: str, worker: str, *, lease_s: float = LEASE_S, now: datetime | None = None
) -> Run | None:
    """Claims this run if it is queued or its worker vanished; else None. Used by local runs."""
    at = now or current(connection)
    return _taken(connection, update(_runs).where(_runs.c.id == run_id, is_claimable(at)), worker, lease_s, at)


def fail_abandoned(
    connection: Connection,
    settled: Collection[str] | None = None,
    *,
    max_deaths: int = MAX_DEATHS,
    now: Instant | None = None,
) -> int:
    """Ends runs whose worker vanished and that no worker may take over; returns how many. `settled`: only these ids.

    These are runs that lost `max_deaths` workers in a row (vanished, or with a broken GPU) without another stored trial
    and would take down the next worker too; live models, which are gone with their process; and local code, which only
    its own machine may run. Runs that have a plan end as finished, others as failed.
    """
    at = current(connection) if now is None else now
    error = "the worker vanished before the run had ended; read the worker's log, then start the run again"
    ended = (
        update(_runs)
        .where(or_(is_in_vain(at, settled, max_deaths), and_(is_abandoned(at, settled), not_(is_data()))))
        .values(
            status=_ended_as(RunStatus.FAILED),
            deaths=_runs.c.deaths + case((_runs.c.status == RunStatus.RUNNING, 1), else_=0),
            error=case((_runs.c.plan_id.is_(None), error)),
            finished_at=at,
            lease_until=None,
        )
        .returning(_runs.c.id)
    )
    return len(connection.execute(ended).all())


def heartbeat(connection: Connection, run: Run, *, lease_s: float = LEASE_S, now: datetime | None = None) -> Run:
    """Extends the lease and returns the current run.

    If the run was cancelled, nothing is extended and the cancelled run is returned, so that the worker stops. Raises
    LeaseLostError when another worker has the run, or when it has ended.
    """
    at = now or current(connection)
    extended = try_update(connection, run, heartbeat_at=at, lease_until=at + timedelta(seconds=lease_s))
    if extended is not None:
        return extended
    found = get(connection, run.id)
    if found is None or found.attempt != run.attempt or found.status is not RunStatus.CANCELLED:
        raise lost(connection, run)
    return found


def note_inspection(
    connection: Connection, run: Run, *, fingerprint: str, environment: Environment, inapplicable: dict[str, str]
) -> Run:
    """Stores the result of the inspection. Raises LeaseLostError."""
    return update_if_held(
        connection,
        run,
        fingerprint=fingerprint,
        environment=environment,
        gpu=environment.gpu,
        inapplicable=inapplicable,
    )


def release(connection: Connection, run: Run, *, is_death: bool = False) -> Run:
    """Puts the run back into the queue. Raises LeaseLostError.

    `is_death`: count it like a vanished worker, because the GPU broke during the run.
    """
    free = {"status": RunStatus.QUEUED, "worker": None, "heartbeat_at": None, "lease_until": None}
    return update_if_held(connection, run, **free, deaths=_runs.c.deaths + int(is_death))


def keep(connection: Connection, run: Run, plan: Plan, verdict: Verdict) -> Run:
    """Stores the plan of a run that continues, so that look-ups find it from now on, and resets the count of deaths.

    Raises LeaseLostError.
    """
    plans.put(connection, plan, run)
    return update_if_held(connection, run, **_result(plan, verdict), deaths=0)


def finish(
    connection: Connection,
    run: Run,
    *,
    plan: Plan | None = None,
    verdict: Verdict | None = None,
    now: datetime | None = None,
) -> Run:
    """Ends the run as finished, and stores its plan if it has one. Raises LeaseLostError, and then stores nothing."""
    if plan is not None:
        plans.put(connection, plan, run, now=now)
    return _ended(connection, run, now or current(connection), RunStatus.FINISHED, **_result(plan, verdict))


def fail(connection: Connection, run: Run, error: str, *, now: datetime | None = None) -> Run:
    """Ends the run as failed, with the reason. Raises LeaseLostError."""
    text = error.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return _ended(connection, run, now or current(connection), RunStatus.FAILED, error=text)


def cancel(connection: Connection, run_id: str, *, team: str | None = None, now: datetime | None = None) -> Run | None:
    """Ends a queued or running run of any worker; an ended run is unchanged. None when there is no such run.

    A run that has its plan and is in its ablation ends as finished; the ablation names what was not measured. The
    worker learns of it from its next heartbeat, and its writes are refused from now on.
    """
    ended = (
        update(_runs)
        .where(is_of(run_id, team), _runs.c.status.in_(UNFINISHED))
        .values(status=_ended_as(RunStatus.CANCELLED), finished_at=now or current(connection), lease_until=None)
        .returning(_runs)
    )
    return only_record(Run, _runs, connection.execute(ended)) or get(connection, run_id, team=team)


def annotate(
    connection: Connection,
    run_id: str,
    *,
    team: str | None = None,
    tags: Sequence[str] | None = None,
    note: str | None = None,
) -> Run | None:
    """Sets tags and note of a run; an argument of None keeps the old value. Returns None when there is no such run."""
    said = {"tags": tags, "note": note}
    given = {name: value for name, value in said.items() if value is not None}
    if not given:
        return get(connection, run_id, team=team)
    statement = update(_runs).where(is_of(run_id, team)).values(**given).returning(_runs)
    return only_record(Run, _runs, connection.execute(statement))


def is_of(run_id: str, team: str | None) -> ColumnElement[bool]:
    return and_(_runs.c.id == run_id, *tables.of_team(_runs, team))


def _result(plan: Plan | None, verdict: Verdict | None) -> dict[str, Any]:
    """The columns of a run that describe its plan."""
    shown = _list_columns(plan.evidence) if plan and plan.evidence else {}
    return {"plan_id": plan.plan_id if plan else None, "verdict": verdict, **shown}


def _list_columns(evidence: Evidence) -> dict[str, Any]:
    """The columns that a list of runs shows of a plan."""
    before = evidence.baseline_peak_bytes
    return {
        "speedup": evidence.speedup,
        "gain": evidence.speedup.median,
        "gain_low": evidence.speedup.low,
        "memory_ratio": evidence.peak_bytes / before if before else None,
    }


def is_data() -> ColumnElement[bool]:
    """Runs whose workload is an archive or from the zoo, so that any machine can carry them out."""
    is_archive = and_(_runs.c.workload == ARCHIVE, _runs.c.archive.is_not(None))
    return or_(is_archive, _begins(_runs.c.workload, ZOO))


def _suits(device: str, gpu: str | None) -> ColumnElement[bool]:
    kind = device.partition(":")[0]
    is_of_kind = or_(_runs.c.device.in_(("", kind)), _begins(_runs.c.device, f"{kind}:"))
    return is_of_kind if gpu is None else and_(is_of_kind, or_(_runs.c.gpu.is_(None), _runs.c.gpu == gpu))


def _begins(column: ColumnElement[str], word: str) -> ColumnElement[bool]:
    """Prefix match. Not LIKE, which ignores case on SQLite: "ZOO:" could be a user's folder with code."""
    return func.substr(column, 1, len(word)) == word


def _taken(connection: Connection, statement: Update, worker: str, lease_s: float, at: Instant) -> Run | None:
    taken = statement.values(
        status=RunStatus.RUNNING,
        worker=worker,
        attempt=_runs.c.attempt + 1,
        deaths=_runs.c.deaths + case((is_abandoned(at), 1), else_=0),
        started_at=func.coalesce(_runs.c.started_at, at, type_=_runs.c.started_at.type),
        heartbeat_at=at,
        lease_until=at + timedelta(seconds=lease_s),
    )
    return only_record(Run, _runs, connection.execute(taken.returning(_runs)))


def _ended_as(status: RunStatus) -> ColumnElement[str]:
    """FINISHED for a run that has its plan, else `status`."""
    return case((_runs.c.plan_id.is_not(None), RunStatus.FINISHED.value), else_=status.value)


def _ended(connection: Connection, run: Run, at: Instant, status: RunStatus, **changes: Any) -> Run:
    return update_if_held(connection, run, status=status, finished_at=at, lease_until=None, **changes)
