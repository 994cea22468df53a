"""A server on a port of its own and a real Chromium that looks at it; every page must stay on the host and quiet."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from server.app import create_app
from server.http.protocol import BoundedProtocol
from server.settings import ServerSettings
from tests.store.conftest import empty_database  # noqa: F401
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope

AXE = (Path(__file__).parent / "axe.min.js").read_text("utf-8")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Chromium as root in a container; and it asks nobody for anything.
_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-component-update", "--no-first-run"]  # fmt: skip
_WIDTH, _HEIGHT = 1280, 900
PATIENCE_MS = 40_000  # on a machine that is busy with other tests
expect.set_options(timeout=PATIENCE_MS)


@dataclass(frozen=True)
class Site:
    """A running server."""

    url: str
    database: Database

    def secret(self, *scopes: Scope, **changes: object) -> str:
        with self.database.begin() as connection:
            return tokens.create(connection, "ada", scopes or (Scope.ADMIN,), **changes)[1]


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> Iterator[Database]:  # noqa: F811
    shutil.copy(empty_database, tmp_path / "server.db")
    with open_database(f"sqlite:///{tmp_path}/server.db", busy_timeout_s=5) as opened:
        yield opened


@pytest.fixture
def site(database: Database) -> Iterator[Site]:
    app = create_app(database, ServerSettings(), is_stopping=lambda: server.should_exit)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=BoundedProtocol, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield Site(f"http://127.0.0.1:{listening.getsockname()[1]}", database)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def executable() -> str:
    """Missing on a developer's machine, its tests are skipped; missing in CI, they fail."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("no browser: apt-get install chromium")
    assert found is not None, "CI has no browser: apt-get install chromium"
    return found


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    """Its event loop runs as long as it does, and no other can beside it: it ends with the tests that need it."""
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Playwright, executable: str) -> Iterator[Browser]:
    with playwright.chromium.launch(executable_path=executable, args=_OPTIONS) as launched:
        yield launched


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.minutes)])
def theme(request: pytest.FixtureRequest) -> str:
    """Every page of a run is looked at in the dark by test_run_pages, and every colour by tests/unit/server/pages."""
    return request.param


NewPage = Callable[..., Page]


@pytest.fixture
def new_page(browser: Browser, site: Site) -> Iterator[NewPage]:
    """Opens pages in contexts of their own; after the test none of them has complained or left the host."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def watched(message: object) -> None:
        # A status that a test asks for is told on the console too; what a script or the policy says is not.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def opened(**options: object) -> Page:
        context = browser.new_context(
            base_url=site.url, viewport={"width": _WIDTH, "height": _HEIGHT}, reduced_motion="reduce", **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", watched)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith(site.url) or complaints.append(request.url))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(new_page: NewPage) -> Page:
    return new_page()


def sign_in(page: Page, secret: str, place: str = "/runs") -> None:
    page.goto(f"/login?next={place}")
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**{place}")


def violations(page: Page) -> list[str]:
    """What axe-core finds against WCAG 2.2 AA and good practice, a line each."""
    page.evaluate(AXE)
    return page.evaluate(
        """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.flatMap(one => one.nodes.map(
            node => `${one.id}: ${one.help}: ${node.target.join(" ")}: ${node.failureSummary}`))"""
    )
