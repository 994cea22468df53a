"""Translates errors of the database drivers into StoreErrors that say what to do. The only place that does so."""

import sqlite3
from typing import Final

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, StatementError

from kitsune.errors import StoreBusyError, StoreError, StoreFullError

_BUSY = "stayed locked by another process for too long; try again, and look for a process that hangs"
FULL = "has no space left; nothing of this write was kept. Free space on its disk (or raise its quota)"
_READ_ONLY = "is read-only; give this user the right to write to it and to its folder, or choose another database"
_DAMAGED = "is damaged; restore it from a backup, or move it away to begin with an empty one"

_SQLITE: Final = {
    sqlite3.SQLITE_BUSY: (StoreBusyError, _BUSY),
    sqlite3.SQLITE_LOCKED: (StoreBusyError, _BUSY),
    sqlite3.SQLITE_FULL: (StoreFullError, FULL),
    sqlite3.SQLITE_READONLY: (StoreError, _READ_ONLY),
    sqlite3.SQLITE_PERM: (StoreError, _READ_ONLY),
    sqlite3.SQLITE_CANTOPEN: (StoreError, "cannot be opened; its folder must exist, and this user may write to it"),
    sqlite3.SQLITE_NOTADB: (StoreError, "is not an SQLite database; choose another path, or move that file away"),
    sqlite3.SQLITE_CORRUPT: (StoreError, _DAMAGED),
    # An exceeded quota (EDQUOT) is reported as an I/O error; only a full disk (ENOSPC) as SQLITE_FULL.
    sqlite3.SQLITE_IOERR: (StoreError, "cannot be read or written; look at the disk, its quota and its mount"),
}

#: SQLSTATE, or its first two or three characters; see https://www.postgresql.org/docs/current/errcodes-appendix.html
_POSTGRESQL: Final = {
    "55P03": (StoreBusyError, _BUSY),
    "57014": (StoreBusyError, "cancelled a statement that took too long; try again"),
    "57P": (StoreError, "closed the connection or is starting up; try again when it is back"),
    "08": (StoreError, "lost the connection; try again when it is back"),
    "40": (StoreBusyError, "gave way to a rival transaction; try again"),
    "53300": (StoreBusyError, "has no connection left; try again, or raise max_connections"),
    "53100": (StoreFullError, FULL),
    "53": (StoreError, "is out of resources; look at its log"),
    "25P03": (StoreBusyError, "ended a transaction that was left open too long; try again"),
    "25006": (StoreError, _READ_ONLY),
    "42501": (StoreError, "refuses this user; grant it the right to use and create tables in the schema"),
    "XX": (StoreError, _DAMAGED),
}


def store_error(error: BaseException, url: URL | None) -> StoreError:
    """The StoreError for an error of SQLAlchemy or a driver; the caller raises it `from error`."""
    driver_error = error.orig if isinstance(error, StatementError) else error
    kind, why = _explained(error, driver_error)
    return kind(f"the database {shown(url) if url else ''} {why}")


def shown(url: URL) -> str:
    """The URL for messages and logs, without the user and the query, which may hold a password."""
    return URL.create(url.drivername, host=url.host, port=url.port, database=url.database).render_as_string()


def _explained(error: BaseException, driver_error: BaseException | None) -> tuple[type[StoreError], str]:
    if isinstance(error, IntegrityError):
        return StoreError, f"refuses a row that contradicts what it holds ({_first_line(driver_error)})"
    code = getattr(driver_error, "sqlite_errorcode", None)
    if isinstance(code, int) and code & 0xFF in _SQLITE:
        return _SQLITE[code & 0xFF]  # the low byte is the primary code, the rest says where it happened
    state = getattr(driver_error, "sqlstate", None)
    if isinstance(state, str):
        known = (_POSTGRESQL[part] for part in (state, state[:3], state[:2]) if part in _POSTGRESQL)
        return next(known, None) or (StoreError, f"refused ({state}: {_first_line(driver_error)})")
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return StoreError, f"closed the connection ({_first_line(driver_error)}); try again when it is back"
    if isinstance(error, OperationalError):
        return StoreError, (
            f"cannot be reached ({_first_line(driver_error)}); look at its address, name, user and password, and "
            "whether the server runs"
        )
    return StoreError, f"refused ({_first_line(driver_error)})"


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
