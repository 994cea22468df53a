"""Tokens: who may do what. A secret goes out once, when it is made; what is stored is its SHA-256.

A plain digest is enough: a secret holds 256 bits of chance, so nobody finds it by trying, however fast the digest is.
It is looked up by that digest, so how long a look-up takes tells nothing of a secret.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime
from sqlalchemy import Connection, bindparam, func, insert, select, update

from kitsune.base.base_record import Record
from kitsune.errors import StoreError
from tuner.records import DEFAULT_TEAM
from tuner.store import tables
from tuner.store.rows import from_row, to_row
from tuner.wall_clock import utcnow

#: Secret scanners know a token by its first characters.
PREFIX: Final = "ksn_"
_SECRET: Final = re.compile(r"ksn_[A-Za-z0-9_-]{43}")

_tokens = tables.tokens
_by_digest = select(_tokens).where(_tokens.c.digest == bindparam("digest"))


class Scope(StrEnum):
    """What a token allows."""

    READ = "read"  #: look at runs, trials and plans
    SUBMIT = "submit"  #: send archives, start and cancel runs
    ADMIN = "admin"  #: everything


class Token(Record):
    """Whom a secret speaks for. The secret is not part of it."""

    id: str
    name: str
    team: str = DEFAULT_TEAM
    scopes: tuple[Scope, ...]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    revoked_at: AwareDatetime | None = None

    def is_good(self, now: datetime) -> bool:
        """Neither revoked nor expired. A revoked token stays so, whatever the clock of a machine says."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def create(
    connection: Connection,
    name: str,
    scopes: Iterable[Scope],
    *,
    team: str = DEFAULT_TEAM,
    expires_at: datetime | None = None,
    secret: str | None = None,
    now: datetime | None = None,
) -> tuple[Token, str]:
    """A token and its secret: a new one, or the given one, which must be of the same form.

    Raises StoreError when the secret is of another form or was given before.
    """
    secret = secret or new_secret()
    if _SECRET.fullmatch(secret) is None:
        raise StoreError(f"a secret is {PREFIX} and 43 of the characters A-Z, a-z, 0-9, _ and -; this one is not")
    wanted = frozenset(scopes)
    token = Token(
        id=secrets.token_hex(5),
        name=name,
        team=team,
        scopes=tuple(scope for scope in Scope if scope in wanted),
        created_at=now or utcnow(),
        expires_at=expires_at,
    )
    connection.execute(insert(_tokens).values(to_row(token, digest=_digest(secret))))
    return token, secret


def authenticate(connection: Connection, secret: str, *, now: datetime | None = None) -> Token | None:
    """The token of this secret; None when it is unknown, expired or revoked."""
    if _SECRET.fullmatch(secret) is None:
        return None
    row = connection.execute(_by_digest, {"digest": _digest(secret)}).one_or_none()
    if row is None:
        return None
    token = from_row(Token, _tokens, row)
    return token if token.is_good(now or utcnow()) else None


def listed(connection: Connection, *, team: str | None = None) -> list[Token]:
    """Every token that was ever made, of this team or of all, the oldest first."""
    whose = [] if team is None else [_tokens.c.team == team]
    statement = select(_tokens).where(*whose).order_by(_tokens.c.created_at, _tokens.c.id)
    return [from_row(Token, _tokens, row) for row in connection.execute(statement)]


def revoke(
    connection: Connection, token_id: str, *, team: str | None = None, now: datetime | None = None
) -> Token | None:
    """Makes a token worthless at once and for good; one that is revoked stays as it is. None when there is none."""
    at = now or utcnow()
    statement = (
        update(_tokens)
        .where(_tokens.c.id == token_id, *([] if team is None else [_tokens.c.team == team]))
        .values(revoked_at=func.coalesce(_tokens.c.revoked_at, at, type_=_tokens.c.revoked_at.type))
        .returning(_tokens)
    )
    row = connection.execute(statement).one_or_none()
    return None if row is None else from_row(Token, _tokens, row)


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
