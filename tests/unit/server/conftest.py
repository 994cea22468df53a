"""Fixtures: an application with its own database, and a client for each kind of token."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from server.app import create_app
from server.settings import ServerSettings
from tests.store.conftest import empty_database  # noqa: F401
from tests.store.samples import after
from tests.unit.kitsune.submission import hostile
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import archives, tokens
from tuner.store.queries.archives import StoredArchive
from tuner.store.queries.tokens import Scope, Token

HERE = "http://localhost:8537"
ALL = (Scope.READ, Scope.SUBMIT)

Client = Callable[..., TestClient]


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> Iterator[Database]:  # noqa: F811
    shutil.copy(empty_database, tmp_path / "server.db")
    with open_database(f"sqlite:///{tmp_path}/server.db") as opened:
        yield opened


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(events_poll_s=0.01, events_ping_s=0.02)


@cache
def resolved(is_loopback: bool) -> FastAPI:
    """An application whose routes all others share: FastAPI takes 45 ms to resolve them at first use."""
    with open_database("sqlite://") as database:
        return create_app(database, ServerSettings(host="127.0.0.1" if is_loopback else "0.0.0.0"))


@pytest.fixture
def app(database: Database, settings: ServerSettings) -> FastAPI:
    made = create_app(database, settings)
    made.router.routes = resolved(settings.is_loopback).router.routes
    return made


@pytest.fixture
def client(app: FastAPI, database: Database) -> Iterator[TestClient]:
    """A client that may read and submit."""
    with TestClient(app, base_url=HERE, headers=bearer(secret(database)), raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def stranger(app: FastAPI) -> Iterator[TestClient]:
    """A client without a token."""
    with TestClient(app, base_url=HERE, raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def archive(database: Database) -> StoredArchive:
    """An archive that is stored already."""
    valid = hostile.valid()
    with database.begin() as connection:
        return archives.put(connection, valid.to_bytes(), valid)[0]


def secret(database: Database, *scopes: Scope, **changes: object) -> str:
    return made(database, *scopes, **changes)[1]


def made(database: Database, *scopes: Scope, **changes: object) -> tuple[Token, str]:
    with database.begin() as connection:
        return tokens.create(connection, "test", scopes or ALL, **changes)


def expired(database: Database) -> str:
    return secret(database, *Scope, expires_at=after(60), now=after(0))


def revoked(database: Database) -> str:
    token, found = made(database, *Scope)
    with database.begin() as connection:
        tokens.revoke(connection, token.id)
    return found


def bearer(given: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {given}"}


def assert_problem(response: object, status: int, *words: str) -> dict[str, object]:
    """Asserts that the answer is a problem with this status and a detail; returns it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["type"].startswith("/problems/")
    assert problem["title"] and len(problem["detail"]) > 20
    for word in words:
        assert word in problem["detail"]
    return problem
