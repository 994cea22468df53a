"""Deletes ended runs and unused archives. Each function is one short transaction and may run in several processes.

Plans are kept when their run is deleted, unless the caller asks otherwise: look-ups still find them, and
`kitsune_models` keeps their models. An archive is deleted when no run of its team uses it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, exists, func, or_, select

from kitsune.errors import ConflictError
from tuner.records import Run
from tuner.store import locks, tables
from tuner.store.queries import plans, runs
from tuner.store.rows import from_row
from tuner.wall_clock import utcnow

#: An archive that was sent less than this ago is kept, because a run with it is about to be submitted.
ABOUT_TO_SUBMIT: Final = timedelta(hours=1)

_archives = tables.archives
_owners = tables.archive_owners
_runs = tables.runs


#: All columns that refer to a run.
_REFERRING: Final = tuple(
    column
    for table in tables.metadata.tables.values()
    for column in table.columns
    if any(key.references(_runs) for key in column.foreign_keys)
)


class Ended(NamedTuple):
    """How many runs ended before a moment, and how many trials they have."""

    runs: int
    trials: int


class Owned(NamedTuple):
    """An archive of a team."""

    team: str
    sha256: str


def count_ended(connection: Connection, before: datetime) -> Ended:
    statement = select(func.count(), func.coalesce(func.sum(_runs.c.trials), 0)).where(_ended(before))
    found, tried = connection.execute(statement).one()
    return Ended(found, int(tried))


def delete_ended(connection: Connection, before: datetime, *, limit: int, with_plans: bool = False) -> int:
    """Deletes up to `limit` runs that ended before then, the oldest first; returns how many.

    Processes that delete at the same time take different runs.
    """
    oldest = select(_runs).where(_ended(before)).order_by(_runs.c.created_at, _runs.c.id).limit(limit)
    return len(_deleted(connection, oldest.with_for_update(skip_locked=True), with_plans=with_plans))


def delete_run(connection: Connection, run_id: str, *, team: str | None = None, with_plan: bool = False) -> Run | None:
    """Deletes an ended run, and its archive if no other run of the team uses it; None when there is no such run.

    Raises ConflictError for a run that has not ended.
    """
    locks.alone(connection, locks.ARCHIVES)
    run = runs.get(connection, run_id, team=team)
    if run is None:
        return None
    ended = select(_runs).where(_runs.c.id == run.id, _runs.c.status.in_(runs.ENDED))
    if not _deleted(connection, ended.with_for_update(), with_plans=with_plan):
        raise ConflictError(f"run {run.id} is {run.status}; cancel it first, or wait until it has ended")
    if run.archive is not None:
        _delete_archives(connection, [Owned(run.team, run.archive)], None)
    return run


def unused_archives(connection: Connection, before: datetime, *, limit: int) -> list[Owned]:
    """Archives that were last sent before then and that no run of their team uses."""
    unused = select(_owners.c.team, _owners.c.sha256).where(_is_unused(before)).limit(limit)
    return [Owned._make(row) for row in connection.execute(unused)]


def delete_archives(connection: Connection, found: Sequence[Owned], before: datetime) -> int:
    """Deletes those of them that are still unused; returns how many."""
    locks.alone(connection, locks.ARCHIVES)
    return _delete_archives(connection, found, before)


def latest_unused(before: datetime, *, now: datetime | None = None) -> datetime:
    """Unused archives sent before this time may be deleted together with runs that ended before `before`."""
    return min(before, (now or utcnow()) - ABOUT_TO_SUBMIT)


def _ended(before: datetime) -> ColumnElement[bool]:
    """`created_at` is compared too (a run is created before it ends), so that an index serves the query."""
    return and_(_runs.c.status.in_(runs.ENDED), _runs.c.created_at < before, _runs.c.finished_at < before)


def _is_unused(before: datetime | None) -> ColumnElement[bool]:
    is_old = [] if before is None else [_owners.c.sent_at < before]
    is_used = exists().where(_runs.c.archive == _owners.c.sha256, _runs.c.team == _owners.c.team)
    return and_(~is_used, *is_old)


def _deleted(connection: Connection, chosen: Select[tuple[object, ...]], *, with_plans: bool) -> list[Run]:
    """Deletes the selected runs, with all rows that refer to them."""
    found = [from_row(Run, _runs, row) for row in connection.execute(chosen)]
    names = [run.id for run in found]
    for column in _REFERRING:
        connection.execute(delete(column.table).where(column.in_(names)))
    connection.execute(delete(_runs).where(_runs.c.id.in_(names)))
    if with_plans:
        plans.delete_of(connection, [run.plan_id for run in found if run.plan_id is not None])
    return found


def _delete_archives(connection: Connection, found: Sequence[Owned], before: datetime | None) -> int:
    """Deletes the ownership rows, and the bytes of archives that no team owns any more."""
    named = or_(*(and_(_owners.c.team == one.team, _owners.c.sha256 == one.sha256) for one in found))
    gone = connection.execute(delete(_owners).where(named, _is_unused(before)).returning(_owners.c.sha256)).all()
    names = {row.sha256 for row in gone}
    is_had = or_(
        exists().where(_owners.c.sha256 == _archives.c.sha256), exists().where(_runs.c.archive == _archives.c.sha256)
    )
    connection.execute(delete(_archives).where(_archives.c.sha256.in_(names), ~is_had))
    return len(gone)
