"""Database: an engine with transactions for writing and for reading, which commit at the end of a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from kitsune.errors import StoreBusyError, StoreError, StoreFullError
from tuner import fault_injection
from tuner.store.error_translation import FULL, shown
from tuner.store.fair_lock import Turns

#: 8 processes that claimed at once waited at most 0.57 s (2000 runs, SQLite, 2 cores); a longer wait means a hang.
BUSY_TIMEOUT_S: Final = 10.0
#: The execution option that makes `tuner/store/engine.py` begin a read-only transaction.
READ_ONLY = "kitsune_read_only"


class Database:
    """An open database. `with database.begin() as connection:` is one transaction; an exception rolls it back."""

    def __init__(self, engine: Engine, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.engine = engine
        self._busy_timeout_s = busy_timeout_s
        self._turns = Turns() if engine.dialect.name == "sqlite" else None

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction that may write. Raises StoreBusyError when others keep the database locked."""
        with self._turn(), self._pool_errors(), self.engine.begin() as connection:
            yield connection
            self._meet_faults()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read-only transaction; it does not wait for writers. A write in it raises StoreError."""
        with self._pool_errors(), self.engine.connect() as connection:
            connection.execution_options(**{READ_ONLY: True})
            if connection.dialect.name == "postgresql":
                connection.execution_options(postgresql_readonly=True)
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _meet_faults(self) -> None:
        """Raises planted faults before the commit, so that the transaction is rolled back."""
        if fault_injection.struck("database-full"):
            raise StoreFullError(f"the database {shown(self.engine.url)} {FULL}")
        if fault_injection.struck("database-away"):
            raise StoreError(f"the database {shown(self.engine.url)} lost the connection; try again when it is back")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Serialises SQLite writes of this process's threads, first come, first served.

        SQLite allows one writer at a time and makes others poll without any order: of 100 clients that submitted
        through 40 threads, one was answered after 12 s, and two not at all.
        """
        if self._turns is None:
            yield
            return
        if not self._turns.take(2 * self._busy_timeout_s):  # twice: if the holder times out, the next can still try
            raise StoreBusyError("other writers of this process kept the database for too long; try again")
        try:
            yield
        finally:
            self._turns.end()

    @contextmanager
    def _pool_errors(self) -> Iterator[None]:
        """Translates the pool's timeout, the only error that does not pass through the `handle_error` event."""
        try:
            yield
        except PoolTimeoutError as error:
            raise StoreBusyError("every connection of this process to the database is in use; try again") from error
