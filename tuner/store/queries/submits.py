"""Idempotent submits: a request to tune becomes one queued run, even if several processes send it several times."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from pydantic import Field
from sqlalchemy import Connection, func, insert, select

from kitsune.base.base_record import Record
from kitsune.base.digest import digest_of_json
from kitsune.errors import ConflictError, NotFoundError, QuotaError
from tuner.ids import new_id
from tuner.records import DEFAULT_TEAM, Run
from tuner.store import locks, tables
from tuner.store.queries import archives, runs
from tuner.store.rows import from_row, only_record
from tuner.wall_clock import utcnow

_runs = tables.runs
_submits = tables.submits


class Request(Record):
    """What to tune, on what, and for how long. With neither budget, a first look at the model picks a time."""

    archive: str = Field(description="SHA-256 of a stored archive")
    device: Literal["", "cuda", "cpu"] = Field(default="", description="empty: on whatever a worker has")
    trials: int | None = Field(default=None, ge=1, lt=2**63)
    budget_s: float | None = Field(default=None, gt=0)
    memory_limit_bytes: int | None = Field(default=None, gt=0, lt=2**63)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    name: str = Field(default="", description="what people call the run")


@dataclass(frozen=True, slots=True)
class Quota:
    """How many runs may be unfinished at once; 0 means no limit."""

    team: int = 0
    owner: int = 0


UNLIMITED: Final = Quota()
#: What a run that is tried again has of the earlier one.
ASKED: Final = {
    *("team", "name", "workload", "archive", "budget_trials", "budget_s", "memory_limit_bytes", "seed", "tags"),
}


def submit(
    connection: Connection,
    request: Request,
    *,
    owner: str,
    team: str = DEFAULT_TEAM,
    key: str | None = None,
    quota: Quota = UNLIMITED,
    now: datetime | None = None,
) -> tuple[Run, bool]:
    """The run of this request, and whether it is new. Needs a transaction that may write.

    With a key: the run of this owner's first submit with this key, even if it has ended; ConflictError when that
    request was different. Without: the oldest unfinished run of the same request and owner, if there is one. Raises
    NotFoundError for an archive that the team has not sent, and then stores nothing. An owner always belongs to the
    same team. Raises QuotaError when there would be more unfinished runs than `quota` allows.
    """
    at = now or utcnow()
    digest = digest_of_json([owner, request.model_dump(mode="json")])
    locks.alone(connection, ("key", owner, key) if key is not None else ("content", digest))  # equal submits wait
    known = unfinished(connection, digest) if key is None else _keyed(connection, owner, key, digest)
    if known is not None:
        return known, False
    locks.together(connection, locks.ARCHIVES)
    check_quota(connection, team, owner, quota)
    run = runs.add(connection, _new_run(connection, request, team, at), content=digest, owner=owner)
    if key is not None:
        row = {"owner": owner, "key": key, "digest": digest, "run_id": run.id, "created_at": at}
        connection.execute(insert(_submits).values(row))
    return run, True


def retry(
    connection: Connection,
    run_id: str,
    *,
    owner: str,
    team: str | None = None,
    quota: Quota = UNLIMITED,
    now: datetime | None = None,
) -> tuple[Run, bool] | None:
    """A queued run with the request of an ended one, and whether it is new; None when there is no such run.

    While a retry of the run is unfinished, that one is returned. Raises ConflictError for a run that has not ended and
    for one that only its own machine can carry out, and QuotaError as `check_quota` does.
    """
    locks.together(connection, locks.ARCHIVES)
    mine = select(_runs, runs.is_data().label("is_data")).where(runs.is_of(run_id, team))
    row = connection.execute(mine.with_for_update(key_share=True)).one_or_none()  # a concurrent retry waits
    if row is None:
        return None
    old = from_row(Run, _runs, row)
    if not old.status.is_finished:
        raise ConflictError(f"run {old.id} is {old.status}; wait until it has ended, or cancel it first")
    if not row.is_data:
        raise ConflictError(
            f"run {old.id} tuned {old.workload!r:.100}, which only the machine where it was asked for has; start it "
            "there again with kitsune tune"
        )
    content = f"retry {old.id}"
    known = unfinished(connection, content)
    if known is not None:
        return known, False
    check_quota(connection, old.team, owner, quota)
    asked = old.model_dump(include=ASKED)
    fingerprint = old.fingerprint if old.archive else ""  # that of a zoo workload is found by the inspection
    device = old.device.partition(":")[0]
    again = Run(id=new_id(), **asked, fingerprint=fingerprint, device=device, created_at=now or utcnow())
    return runs.add(connection, again, content=content, owner=owner), True


def check_quota(connection: Connection, team: str, owner: str, quota: Quota) -> None:
    """Raises QuotaError when the team or the owner has reached its number of unfinished runs.

    Concurrent submits may exceed the quota together.
    """
    for who, is_theirs, most in (
        (f"the team {team}", _runs.c.team == team, quota.team),
        ("this token", _runs.c.owner == owner, quota.owner),
    ):
        active = select(func.count()).select_from(_runs).where(is_theirs, _runs.c.status.in_(runs.UNFINISHED))
        if most and connection.execute(active).scalar_one() >= most:
            raise QuotaError(
                f"{who} has {most} runs that have not ended, and may have no more; wait until one has, or cancel one "
                "that nobody needs"
            )


def unfinished(connection: Connection, content: str) -> Run | None:
    """The oldest unfinished run with this content (see `runs.add`)."""
    statement = (
        select(_runs)
        .where(_runs.c.content == content, _runs.c.status.in_(runs.UNFINISHED))
        .order_by(_runs.c.created_at, _runs.c.id)
        .limit(1)
    )
    return only_record(Run, _runs, connection.execute(statement))


def _keyed(connection: Connection, owner: str, key: str, digest: str) -> Run | None:
    """The run that was submitted with this key. Raises ConflictError when its request was different."""
    row = connection.execute(
        select(_submits.c.digest, *_runs.c)
        .join_from(_submits, _runs)
        .where(_submits.c.owner == owner, _submits.c.key == key)
    ).one_or_none()
    if row is None:
        return None
    if row.digest != digest:
        raise ConflictError(
            f"the key {key!r:.100} belongs to run {row.id}, which was asked for with other words; send that request "
            "again as it was, or this one with a new key"
        )
    return from_row(Run, _runs, row)


def _new_run(connection: Connection, request: Request, team: str, at: datetime) -> Run:
    """Raises NotFoundError."""
    archive = archives.get(connection, request.archive, team=team)
    if archive is None:
        raise NotFoundError(f"there is no archive {request.archive!r:.100}; send it first")
    return Run(
        id=new_id(),
        team=team,
        name=request.name,
        workload=runs.ARCHIVE,
        archive=archive.sha256,
        fingerprint=archive.fingerprint,
        device=request.device,
        budget_trials=request.trials,
        budget_s=request.budget_s,
        memory_limit_bytes=request.memory_limit_bytes,
        seed=request.seed,
        created_at=at,
    )
