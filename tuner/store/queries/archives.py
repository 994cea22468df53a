"""Archives of training steps, stored under their SHA-256 and never changed."""

from datetime import datetime

from pydantic import AwareDatetime
from sqlalchemy import Connection, and_, func, or_, select, update

from kitsune.base.base_record import Record
from kitsune.base.digest import digest_of
from kitsune.errors import QuotaError
from kitsune.submission.format.archive import Archive
from tuner.records import DEFAULT_TEAM
from tuner.store import locks, tables
from tuner.store.insert_once import insert_once
from tuner.store.rows import only_record, to_row
from tuner.wall_clock import utcnow

_archives = tables.archives
_owners = tables.archive_owners


class StoredArchive(Record):
    """Metadata of an archive."""

    sha256: str
    size_bytes: int
    fingerprint: str
    model_fingerprint: str
    created_at: AwareDatetime


def put(
    connection: Connection,
    content: bytes,
    archive: Archive,
    *,
    team: str = DEFAULT_TEAM,
    most_bytes: int = 0,
    now: datetime | None = None,
) -> tuple[StoredArchive, bool]:
    """Stores `content`, which must be `archive.to_bytes()`, for a team. Returns it and whether it was new to the team.

    The bytes are stored once for all teams; the result does not reveal whether another team sent them before. Raises
    QuotaError when the team would exceed `most_bytes` (0: no limit); the caller must then roll back.
    """
    locks.together(connection, locks.ARCHIVES)
    made = StoredArchive(
        sha256=digest_of(content),
        size_bytes=len(content),
        fingerprint=archive.fingerprint,
        model_fingerprint=archive.model_fingerprint,
        created_at=now or utcnow(),
    )
    if not insert_once(connection, _archives, to_row(made, content=content)):
        _mend(connection, made, content)
    step = {"team": team, "fingerprint": made.fingerprint, "model_fingerprint": made.model_fingerprint}
    insert_once(connection, tables.models, step)
    owner = {"team": team, "sha256": made.sha256, "size_bytes": made.size_bytes}
    if insert_once(connection, _owners, {**owner, "created_at": made.created_at, "sent_at": made.created_at}):
        if most_bytes:
            _check_quota(connection, team, most_bytes)
        return made, True
    is_theirs = and_(_owners.c.team == team, _owners.c.sha256 == made.sha256)
    connection.execute(update(_owners).where(is_theirs).values(sent_at=made.created_at))
    stored = get(connection, made.sha256, team=team)
    assert stored is not None, "the lock prevents its deletion"
    return stored, False


def _mend(connection: Connection, made: StoredArchive, content: bytes) -> None:
    """Repairs a damaged row when the same archive is sent again."""
    of_content = {"content": content, **made.model_dump(include={"size_bytes", "fingerprint", "model_fingerprint"})}
    is_damaged = or_(*(_archives.c[name] != value for name, value in of_content.items()))
    connection.execute(update(_archives).where(_archives.c.sha256 == made.sha256, is_damaged).values(**of_content))


def _check_quota(connection: Connection, team: str, most_bytes: int) -> None:
    """Raises QuotaError. Archives that are sent concurrently may exceed the quota together."""
    kept_bytes = connection.scalar(select(func.sum(_owners.c.size_bytes)).where(_owners.c.team == team)) or 0
    if kept_bytes > most_bytes:
        raise QuotaError(
            f"the archives of the team {team} may have {most_bytes / 2**30:.3g} GiB, and with this one they have "
            f"{kept_bytes / 2**30:.3g}; delete runs that nobody needs, or ask the owner of the server for more"
        )


def get(connection: Connection, sha256: str, *, team: str = DEFAULT_TEAM) -> StoredArchive | None:
    """The archive of this digest if the team sent it; `created_at` is when the team first did."""
    columns = [(_owners if name == "created_at" else _archives).c[name] for name in StoredArchive.model_fields]
    is_theirs = and_(_owners.c.team == team, _owners.c.sha256 == sha256)
    found = connection.execute(select(*columns).join_from(_owners, _archives).where(is_theirs))
    return only_record(StoredArchive, _archives, found)


def content(connection: Connection, sha256: str) -> bytes | None:
    """The bytes of an archive of any team, for workers. The caller validates them with `Archive.from_bytes`."""
    found: bytes | None = connection.scalar(select(_archives.c.content).where(_archives.c.sha256 == sha256))
    return found
