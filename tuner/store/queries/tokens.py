"""Access tokens and their scopes. The secret is returned once, when it is created; only its SHA-256 is stored.

A plain digest is enough: with 256 random bits a secret cannot be guessed, however fast the digest is. Tokens are looked
up by the digest, so timing reveals nothing about a secret.
"""

import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime
from sqlalchemy import Connection, bindparam, func, insert, select, update

from kitsune.base.base_record import Record
from kitsune.base.digest import digest_of
from kitsune.errors import StoreError
from tuner.records import DEFAULT_TEAM
from tuner.store import tables
from tuner.store.rows import from_row, only_record, to_row
from tuner.wall_clock import utcnow

#: A fixed prefix, so that secret scanners recognise tokens.
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
    """An access token, without its secret."""

    id: str
    name: str
    team: str = DEFAULT_TEAM
    scopes: tuple[Scope, ...]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    revoked_at: AwareDatetime | None = None

    def is_good(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired. Revocation does not depend on any clock."""
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
    """A token and its secret: a new one, or the given `secret`, which must have the same format.

    Raises StoreError when the secret has another format or is in use.
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
    connection.execute(insert(_tokens).values(to_row(token, digest=digest_of(secret))))
    return token, secret


def authenticate(connection: Connection, secret: str, *, now: datetime | None = None) -> Token | None:
    """The token of this secret; None when it is unknown, expired or revoked."""
    if _SECRET.fullmatch(secret) is None:
        return None
    token = only_record(Token, _tokens, connection.execute(_by_digest, {"digest": digest_of(secret)}))
    return token if token is not None and token.is_good(now or utcnow()) else None


def listed(connection: Connection, *, team: str | None = None) -> list[Token]:
    """All tokens of this team or (None) of all teams, including revoked ones, oldest first."""
    statement = select(_tokens).where(*tables.of_team(_tokens, team)).order_by(_tokens.c.created_at, _tokens.c.id)
    return [from_row(Token, _tokens, row) for row in connection.execute(statement)]


def revoke(
    connection: Connection, token_id: str, *, team: str | None = None, now: datetime | None = None
) -> Token | None:
    """Revokes a token; an already revoked one is unchanged. None when there is no such token."""
    at = now or utcnow()
    statement = (
        update(_tokens)
        .where(_tokens.c.id == token_id, *tables.of_team(_tokens, team))
        .values(revoked_at=func.coalesce(_tokens.c.revoked_at, at, type_=_tokens.c.revoked_at.type))
        .returning(_tokens)
    )
    return only_record(Token, _tokens, connection.execute(statement))


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)
