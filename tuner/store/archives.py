"""Archives: a training step as bytes in, the same bytes under their SHA-256 out. Written once, never changed."""

import hashlib
from datetime import datetime

from pydantic import AwareDatetime
from sqlalchemy import Connection, select

from kitsune.record import Record
from kitsune.submission.archive import Archive
from tuner.store import tables
from tuner.store.once import insert_once
from tuner.store.rows import from_row, to_row, utcnow

_archives = tables.archives


class StoredArchive(Record):
    """What is known of an archive without reading it."""

    sha256: str
    size_bytes: int
    fingerprint: str
    model_fingerprint: str
    created_at: AwareDatetime


def put(
    connection: Connection, content: bytes, archive: Archive, *, now: datetime | None = None
) -> tuple[StoredArchive, bool]:
    """Stores `content`, which must be `archive.to_bytes()`, unless it is there already; and whether it was new."""
    made = StoredArchive(
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        fingerprint=archive.fingerprint,
        model_fingerprint=archive.model_fingerprint,
        created_at=now or utcnow(),
    )
    if insert_once(connection, _archives, to_row(made, content=content)):
        return made, True
    stored = get(connection, made.sha256)
    assert stored is not None, "archives are never deleted"
    return stored, False


def get(connection: Connection, sha256: str) -> StoredArchive | None:
    columns = [_archives.c[name] for name in StoredArchive.model_fields]
    row = connection.execute(select(*columns).where(_archives.c.sha256 == sha256)).one_or_none()
    return None if row is None else from_row(StoredArchive, _archives, row)


def content(connection: Connection, sha256: str) -> bytes | None:
    """The bytes of the archive. Whoever reads them checks them again: `Archive.from_bytes`."""
    found: bytes | None = connection.scalar(select(_archives.c.content).where(_archives.c.sha256 == sha256))
    return found
