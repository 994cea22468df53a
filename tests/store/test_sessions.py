"""Sessions: how long a cookie opens something, on both databases."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from tests.store.samples import START, after
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import sessions, tokens
from tuner.store.queries.sessions import LIFETIME, Session
from tuner.store.queries.tokens import Scope, Token

HOUR = 3600


def a_token(database: Database, **changes: object) -> Token:
    with database.begin() as connection:
        return tokens.create(connection, "ada", (Scope.READ,), now=START, **changes)[0]


def started(database: Database, token: Token, at: float = 0) -> tuple[Session, str]:
    with database.begin() as connection:
        return sessions.start(connection, token, now=after(at))


def found(database: Database, secret: str, at: float) -> tuple[Session, Token] | None:
    with database.read() as connection:
        return sessions.find(connection, secret, now=after(at))


def test_a_session_opens_until_it_ends(database: Database) -> None:
    token = a_token(database)
    session, secret = started(database, token)
    assert session.ends_at == START + LIFETIME == after(12 * HOUR)
    assert found(database, secret, 12 * HOUR - 1) == (session, token)
    assert found(database, secret, 12 * HOUR) is None


def test_a_session_never_outlives_its_token(database: Database) -> None:
    session, secret = started(database, a_token(database, expires_at=after(HOUR)))
    assert session.ends_at == after(HOUR)
    assert found(database, secret, HOUR - 1) is not None
    assert found(database, secret, HOUR) is None


def test_a_revoked_token_ends_its_sessions_at_once(database: Database) -> None:
    token, other = a_token(database), a_token(database)
    (_, secret), (_, kept) = started(database, token), started(database, other)
    with database.begin() as connection:
        tokens.revoke(connection, token.id, now=after(1))
    assert found(database, secret, 1) is None
    assert found(database, kept, 1) is not None


def test_a_session_can_be_ended(database: Database) -> None:
    token = a_token(database)
    (_, secret), (_, kept) = started(database, token), started(database, token)
    with database.begin() as connection:
        sessions.end(connection, secret)
        sessions.end(connection, "of nobody")
    assert found(database, secret, 1) is None
    assert found(database, kept, 1) is not None


def test_sessions_that_have_ended_are_forgotten(database: Database) -> None:
    token = a_token(database)
    for hours in (0, 1, 12.5):
        started(database, token, hours * HOUR)
    with database.read() as connection:
        assert connection.scalar(select(func.count()).select_from(tables.sessions)) == 2


def test_what_is_stored_opens_nothing(database: Database) -> None:
    session, secret = started(database, a_token(database))
    with database.read() as connection:
        row = connection.execute(select(tables.sessions)).one()
    assert secret not in row and session.csrf != secret
    assert found(database, row.cookie, 1) is None
    assert len(secret) == len(session.csrf) == 43


@pytest.mark.parametrize("secret", ["", "x", "\x00", "é" * 1000, "' OR 1=1 --"])
def test_other_words_open_nothing(database: Database, secret: str) -> None:
    started(database, a_token(database))
    assert found(database, secret, 1) is None


def test_two_sessions_share_nothing(database: Database) -> None:
    token = a_token(database)
    (one, first), (other, second) = started(database, token), started(database, token)
    assert first != second and one.csrf != other.csrf
    assert one.ends_at - one.started_at == timedelta(hours=12)
