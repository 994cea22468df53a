"""Browser sessions: cookie, lifetime and token. Only digests of cookies are stored.

Every look-up checks the token too, so revoking a token ends its sessions at once.
"""

import secrets
from datetime import datetime, timedelta
from typing import Final

from pydantic import AwareDatetime
from sqlalchemy import Connection, delete, insert, select

from kitsune.base.base_record import Record
from kitsune.base.digest import digest_of
from tuner.store import tables
from tuner.store.queries.tokens import Token
from tuner.store.rows import from_row, to_row
from tuner.wall_clock import utcnow

LIFETIME: Final = timedelta(hours=12)

_sessions = tables.sessions
_tokens = tables.tokens


class Session(Record):
    """A signed-in session. `csrf` is the secret in every form of its pages."""

    token_id: str
    csrf: str
    started_at: AwareDatetime
    ends_at: AwareDatetime


def start(connection: Connection, token: Token, *, now: datetime | None = None) -> tuple[Session, str]:
    """A new session and the secret for its cookie. Deletes expired sessions."""
    at = now or utcnow()
    connection.execute(delete(_sessions).where(_sessions.c.ends_at <= at))
    secret = secrets.token_urlsafe(32)
    end = at + LIFETIME
    session = Session(
        token_id=token.id,
        csrf=secrets.token_urlsafe(32),
        started_at=at,
        ends_at=end if token.expires_at is None else min(end, token.expires_at),
    )
    connection.execute(insert(_sessions).values(to_row(session, cookie=digest_of(secret))))
    return session, secret


def find(connection: Connection, secret: str, *, now: datetime | None = None) -> tuple[Session, Token] | None:
    """The session of this cookie and its token; None when it is unknown or expired, or its token is not valid."""
    at = now or utcnow()
    columns = [_sessions.c[name] for name in Session.model_fields]
    row = connection.execute(
        select(*columns, *_tokens.c)
        .join_from(_sessions, _tokens)
        .where(_sessions.c.cookie == digest_of(secret), _sessions.c.ends_at > at)
    ).one_or_none()
    if row is None:
        return None
    token = from_row(Token, _tokens, row)
    return (from_row(Session, _sessions, row), token) if token.is_good(at) else None


def end(connection: Connection, secret: str) -> None:
    """Deletes the session of this cookie."""
    connection.execute(delete(_sessions).where(_sessions.c.cookie == digest_of(secret)))
