"""Fixtures: a browser without scripts, which keeps its cookie and does not follow redirects by default."""

from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.store.conftest import empty_database  # noqa: F401
from tests.unit.server.conftest import HERE, app, archive, database, made, settings  # noqa: F401
from tests.unit.server.pages.visits import Visit, visit
from tuner.store.database import Database
from tuner.store.queries import sessions
from tuner.store.queries.sessions import Session
from tuner.store.queries.tokens import Scope, Token

HTML = {"Accept": "text/html,application/xhtml+xml"}

Browser = Callable[..., TestClient]


@pytest.fixture
def browser(app: FastAPI, database: Database) -> Iterator[Browser]:  # noqa: F811
    """Makes browsers, signed in with a token with these scopes, or with this cookie."""
    opened: list[TestClient] = []

    def open_one(*scopes: Scope, cookie: str | None = None, **changes: object) -> TestClient:
        client = TestClient(
            app, base_url=HERE, headers=HTML, follow_redirects=False, raise_server_exceptions=False
        ).__enter__()
        opened.append(client)
        if scopes:
            _, cookie = signed_in(database, made(database, *scopes, **changes)[0])
        if cookie is not None:
            client.cookies.set("kitsune_session", cookie)
        return client

    yield open_one
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def stranger(browser: Browser) -> TestClient:
    return browser()


@pytest.fixture
def admin(browser: Browser) -> TestClient:
    return browser(Scope.ADMIN)


@pytest.fixture
def ada(app: FastAPI, database: Database) -> Iterator[Visit]:  # noqa: F811
    with visit(app, database) as made:
        yield made


@pytest.fixture
def reader(app: FastAPI, database: Database) -> Iterator[Visit]:  # noqa: F811
    with visit(app, database, Scope.READ) as made:
        yield made


@pytest.fixture
def outsider(app: FastAPI, database: Database) -> Iterator[Visit]:  # noqa: F811
    with visit(app, database, team="others") as made:
        yield made


def signed_in(database: Database, token: Token, **changes: object) -> tuple[Session, str]:  # noqa: F811
    with database.begin() as connection:
        return sessions.start(connection, token, **changes)


def csrf_of(client: TestClient, place: str = "/submit") -> str:
    """The CSRF token from the form of a page."""
    text = client.get(place).text
    return text.partition('name="csrf" value="')[2].partition('"')[0]


def assert_page(response: object, status: int, *words: str) -> str:
    """Asserts that the answer is a page with this status and the strict policy; returns its text."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert (response.headers["cache-control"], response.headers["x-content-type-options"]) == ("no-store", "nosniff")
    assert '<main id="main"' in response.text and 'lang="en"' in response.text
    for word in words:
        assert word in response.text
    return response.text
