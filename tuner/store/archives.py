"""Archives: a training step as bytes in, the same bytes under their SHA-256 out. Written once, never changed."""

import hashlib
from datetime import datetime

from pydantic import AwareDatetime
from sqlalchemy import Connection, and_, select

from kitsune.record import Record
from kitsune.submission.archive import Archive
from tuner.records import DEFAULT_TEAM
from tuner.store import tables
from tuner.store.once import insert_once
from tuner.store.rows import from_row, to_row, utcnow

_archives = tables.archives
_owners = tables.archive_owners


class StoredArchive(Record):
    """What is known of an archive without reading it."""

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
    now: datetime | None = None,
) -> tuple[StoredArchive, bool]:
    """Stores `content`, which must be `archive.to_bytes()`, for a team; and whether it was new to that team.

    The bytes are kept once. Nothing in the answer tells whether another team had sent them before.
    """
    made = StoredArchive(
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        fingerprint=archive.fingerprint,
        model_fingerprint=archive.model_fingerprint,
        created_at=now or utcnow(),
    )
    insert_once(connection, _archives, to_row(made, content=content))
    if insert_once(connection, _owners, {"team": team, "sha256": made.sha256, "created_at": made.created_at}):
        return made, True
    stored = get(connection, made.sha256, team=team)
    assert stored is not None, "archives are never deleted"
    return stored, False


def get(connection: Connection, sha256: str, *, team: str = DEFAULT_TEAM) -> StoredArchive | None:
    """What the team sent under this name, since when it has it."""
    columns = [(_owners if name == "created_at" else _archives).c[name] for name in StoredArchive.model_fields]
    is_theirs = and_(_owners.c.team == team, _owners.c.sha256 == sha256)
    row = connection.execute(select(*columns).join_from(_owners, _archives).where(is_theirs)).one_or_none()
    return None if row is None else from_row(StoredArchive, _archives, row)


def content(connection: Connection, sha256: str) -> bytes | None:
    """The bytes of the archive, for those who carry out runs of any team.

    Whoever reads them checks them again: `Archive.from_bytes`.
    """
    found: bytes | None = connection.scalar(select(_archives.c.content).where(_archives.c.sha256 == sha256))
    return found
