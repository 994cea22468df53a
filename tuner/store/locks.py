"""Named PostgreSQL advisory locks until the end of a transaction; no-ops on SQLite, which has one writer at a time."""

import hashlib
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, func, select

from kitsune.base.base_record import canonical_json

#: Held shared while rows refer to an archive, and exclusively while archives are deleted: an archive that was found
#: still exists when a row that refers to it is written. Taken before any row lock.
ARCHIVES: Final = ("archives",)


def alone(connection: Connection, what: Sequence[str]) -> None:
    """Takes the lock exclusively; waits until nobody else holds it."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_number(what))))


def together(connection: Connection, what: Sequence[str]) -> None:
    """Takes the lock shared; waits until nobody holds it exclusively."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock_shared(_number(what))))


def _number(what: Sequence[str]) -> int:
    digest = hashlib.sha256(canonical_json(what).encode()).digest()
    return int.from_bytes(digest[:8], signed=True)
