"""Submits: a request to tune in, one queued run out, however often and by however many processes it is sent."""

import hashlib
from datetime import datetime
from typing import Any, Literal

from pydantic import Field
from sqlalchemy import Connection, func, insert, select

from kitsune.errors import ConflictError, NotFoundError
from kitsune.record import Record, canonical_json
from tuner.ids import new_id
from tuner.records import DEFAULT_TEAM, DEFAULT_TRIALS, Run
from tuner.store import archives, runs, tables
from tuner.store.rows import from_row, utcnow

_runs = tables.runs
_submits = tables.submits


class Request(Record):
    """What to tune, on what, and for how long. With neither budget it is the usual number of trials."""

    archive: str = Field(description="SHA-256 of a stored archive")
    device: Literal["", "cuda", "cpu"] = Field(default="", description="empty: on whatever a worker has")
    trials: int | None = Field(default=None, ge=1, lt=2**63)
    budget_s: float | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    name: str = Field(default="", description="what people call the run")


def submit(
    connection: Connection,
    request: Request,
    *,
    owner: str,
    team: str = DEFAULT_TEAM,
    key: str | None = None,
    now: datetime | None = None,
) -> tuple[Run, bool]:
    """The run of this request, and whether it is new. `connection` is of a transaction that may write.

    With a key: the run that this owner's first submit with this key started, also when it has ended; ConflictError when
    that one asked for something else. Without: the oldest unfinished run of the same request and owner, if there is
    one. Raises NotFoundError for an archive that the team has not sent, and then remembers nothing. An owner belongs to
    one team for good.
    """
    at = now or utcnow()
    digest = _digest([owner, request.model_dump(mode="json")])
    _wait_for_twins(connection, ["key", owner, key] if key is not None else ["content", digest])
    known = runs.unfinished(connection, digest) if key is None else _keyed(connection, owner, key, digest)
    if known is not None:
        return known, False
    run = runs.add(connection, _new_run(connection, request, team, at), content=digest)
    if key is not None:
        row = {"owner": owner, "key": key, "digest": digest, "run_id": run.id, "created_at": at}
        connection.execute(insert(_submits).values(row))
    return run, True


def _wait_for_twins(connection: Connection, what: list[Any]) -> None:
    """Until the transaction ends, nobody else submits the same. SQLite has one writer at a time anyway."""
    if connection.dialect.name == "postgresql":
        number = int.from_bytes(bytes.fromhex(_digest(what))[:8], signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(number)))


def _keyed(connection: Connection, owner: str, key: str, digest: str) -> Run | None:
    """Raises ConflictError."""
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
        budget_trials=DEFAULT_TRIALS if request.trials is None and request.budget_s is None else request.trials,
        budget_s=request.budget_s,
        seed=request.seed,
        created_at=at,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
