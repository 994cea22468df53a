"""Opens databases: creates the SQLAlchemy engine, sets up connections, translates driver errors and migrates."""

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import ArgumentError

from kitsune.base.environment import private_folder
from kitsune.errors import StoreError
from tuner.store.database import BUSY_TIMEOUT_S, READ_ONLY, Database
from tuner.store.error_translation import store_error
from tuner.store.migrate import bring_up_to_date

CONNECT_TIMEOUT_S = 10
#: A broken network or a vanished host is detected after 30 s; TCP by itself takes 15 minutes.
KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
#: PostgreSQL ends idle transactions after this time. The host of a worker may vanish without closing its connection,
#: and its locks would hide the run from every claim until TCP gives up, after two hours.
SILENCE_S = 60.0


def open_database(url: str, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Database:
    """Opens `sqlite:///PATH` (its folder is created), `sqlite://` (in memory, for one thread) or `postgresql://...`.

    An empty or older database is migrated first. Raises SchemaError for a database of another version, and StoreError
    (StoreBusyError, StoreFullError) when it cannot be opened.
    """
    parsed = _checked(url)
    if parsed.get_backend_name() == "sqlite":
        _make_private(parsed)
    engine = create(parsed, busy_timeout_s=busy_timeout_s)
    try:
        bring_up_to_date(Database(engine))
    except BaseException:
        engine.dispose()
        raise
    return Database(engine, busy_timeout_s=busy_timeout_s)


def create(url: str | URL, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Engine:
    """An engine with Kitsune's timeouts and event handlers, not yet connected and not migrated."""
    parsed = _checked(url)
    in_memory = parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:")
    try:
        if in_memory:
            engine = create_engine(parsed, poolclass=StaticPool, connect_args={"check_same_thread": False})
        elif parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed, connect_args={"timeout": busy_timeout_s})
        else:
            habits = {"connect_timeout": CONNECT_TIMEOUT_S, **KEEPALIVE}
            engine = create_engine(parsed, pool_pre_ping=True, connect_args=habits)
    except ImportError as error:
        raise StoreError(
            f"PostgreSQL needs the psycopg driver ({error}); install it with: pip install 'kitsune-torch[postgres]'"
        ) from error
    event.listen(engine, "handle_error", _translate, retval=True)
    if parsed.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _sqlite_preparer(busy_timeout_s))
        event.listen(engine, "begin", _begin_sqlite)
    else:
        event.listen(engine, "connect", _postgresql_preparer(busy_timeout_s))
    return engine


def _checked(url: str | URL) -> URL:
    """The URL with the supported driver. Raises StoreError; the message omits the URL, which may hold a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise StoreError(
            "the database URL cannot be read; it looks like sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"
        ) from error
    if "@" in (parsed.host or ""):
        raise StoreError("the database URL has more than one @; in a name or a password, write it as %40")
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("postgresql+psycopg", "sqlite", "sqlite+pysqlite"):
        return parsed
    raise StoreError(f"a database URL cannot begin with {parsed.drivername}://; use sqlite:/// or postgresql://")


def _make_private(url: URL) -> None:
    """Creates a new SQLite file with access for this user only; SQLite's side files inherit its mode."""
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        return
    path = Path(url.database).absolute()
    try:
        private_folder(path.parent)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {path.parent} for the database ({error.strerror}); choose another with "
            "KITSUNE_HOME or KITSUNE_DATABASE_URL"
        ) from error
    with contextlib.suppress(OSError):  # it exists, or cannot be created, which SQLite will report
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _translate(context: ExceptionContext) -> StoreError | None:
    """SQLAlchemy calls this for every driver error: on connect, begin, execute, fetch and commit.

    For a dead pooled connection SQLAlchemy's own error is kept, because that makes the pool replace the connection.
    """
    if context.sqlalchemy_exception is None or context.is_pre_ping:
        return None
    return store_error(context.sqlalchemy_exception, context.engine.url if context.engine else None)


def _sqlite_preparer(busy_timeout_s: float) -> Any:
    def prepare(dbapi_connection: DBAPIConnection, _record: Any) -> None:
        """Runs once per connection.

        isolation_level None: Python's sqlite3 opens no transaction by itself; `_begin_sqlite` does.
        synchronous FULL: in WAL mode NORMAL would lose the last commits at a power failure, but an acknowledged run
        must never be lost.
        """
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA synchronous = FULL")
        _use_wal(cursor, time.monotonic() + busy_timeout_s)
        cursor.close()

    return prepare


def _use_wal(cursor: DBAPICursor, deadline: float) -> None:
    """Switches the file to WAL mode, in which readers and the writer do not block each other. The mode is persistent.

    The switch ignores SQLite's busy timeout when several processes open a new file (2 of some 220 openings by 8
    processes failed with "database is locked"), so it is retried here until the deadline.
    """
    while True:
        try:
            cursor.execute("PRAGMA journal_mode")
            mode = cursor.fetchone()
            if mode is None or mode[0] not in ("wal", "memory"):
                cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    """Writers lock at once: with BEGIN DEFERRED, 8 processes got 1148 "database is locked" errors in 300 runs."""
    read_only = connection.get_execution_options().get(READ_ONLY, False)
    connection.exec_driver_sql(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _postgresql_preparer(busy_timeout_s: float) -> Any:
    def prepare(dbapi_connection: DBAPIConnection, _record: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"SET lock_timeout = {max(1, round(busy_timeout_s * 1000))}")
        cursor.execute(f"SET idle_in_transaction_session_timeout = {round(SILENCE_S * 1000)}")
        cursor.close()
        dbapi_connection.commit()

    return prepare
