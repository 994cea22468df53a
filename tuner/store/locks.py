"""Words in, a lock of PostgreSQL on them until the transaction ends. SQLite has one writer at a time anyway."""

import hashlib
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, func, select

from kitsune.base.base_record import canonical_json

#: Held together by all who refer to an archive, and alone by who deletes some: what was found is still there when a row
#: is written that refers to it. Taken before any row is locked.
ARCHIVES: Final = ("archives",)


def alone(connection: Connection, what: Sequence[str]) -> None:
    """Waits until nobody else holds it."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_number(what))))


def together(connection: Connection, what: Sequence[str]) -> None:
    """Waits until nobody holds it alone."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock_shared(_number(what))))


def _number(what: Sequence[str]) -> int:
    digest = hashlib.sha256(canonical_json(what).encode()).digest()
    return int.from_bytes(digest[:8], signed=True)
