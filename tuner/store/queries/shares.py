"""Read-only links to runs. Anyone with the secret of a link can see its run; only the SHA-256 of it is stored."""

import re
import secrets
from datetime import datetime
from typing import Final

from pydantic import AwareDatetime
from sqlalchemy import Connection, insert, select, update

from kitsune.base.base_record import Record
from kitsune.base.digest import digest_of
from tuner.store import tables
from tuner.store.queries import runs
from tuner.store.rows import from_row, only_record, to_row
from tuner.wall_clock import utcnow

_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{43}")

_shares = tables.shares


class Share(Record):
    """A link to a run, without its secret."""

    id: str
    run_id: str
    team: str
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    ended_at: AwareDatetime | None = None

    def is_good(self, now: datetime) -> bool:
        return self.ended_at is None and (self.expires_at is None or now < self.expires_at)


def create(
    connection: Connection, run_id: str, *, team: str, expires_at: datetime | None = None, now: datetime | None = None
) -> tuple[Share, str] | None:
    """A new link and its secret, which is not stored; None when the team has no such run."""
    if runs.get(connection, run_id, team=team) is None:
        return None
    secret = secrets.token_urlsafe(32)
    share = Share(id=secrets.token_hex(5), run_id=run_id, team=team, created_at=now or utcnow(), expires_at=expires_at)
    connection.execute(insert(_shares).values(to_row(share, digest=digest_of(secret))))
    return share, secret


def find(connection: Connection, secret: str, *, now: datetime | None = None) -> Share | None:
    """The link of this secret; None when it is unknown, expired or ended."""
    if _SECRET.fullmatch(secret) is None:
        return None
    found = connection.execute(select(_shares).where(_shares.c.digest == digest_of(secret)))
    share = only_record(Share, _shares, found)
    return share if share is not None and share.is_good(now or utcnow()) else None


def listed(connection: Connection, run_id: str, *, team: str, now: datetime | None = None) -> list[Share]:
    """The valid links to a run of the team, oldest first."""
    statement = (
        select(_shares)
        .where(_shares.c.run_id == run_id, _shares.c.team == team, _shares.c.ended_at.is_(None))
        .order_by(_shares.c.created_at, _shares.c.id)
    )
    found = [from_row(Share, _shares, row) for row in connection.execute(statement)]
    return [share for share in found if share.is_good(now or utcnow())]


def end(connection: Connection, run_id: str, *, team: str, now: datetime | None = None) -> int:
    """Revokes every link to a run of the team; returns how many were open."""
    ended = (
        update(_shares)
        .where(_shares.c.run_id == run_id, _shares.c.team == team, _shares.c.ended_at.is_(None))
        .values(ended_at=now or utcnow())
        .returning(_shares.c.id)
    )
    return len(connection.execute(ended).all())
