"""An engine in, transactions out: one for writing, one for reading, each committed at its edge."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from kitsune.errors import StoreBusyError, StoreError, StoreFullError
from tuner.measuring import fault_injection
from tuner.store.error_translation import FULL, shown
from tuner.store.fair_lock import Turns

#: 8 processes that claim at once waited 0.57 s at most (2000 runs, SQLite, 2 cores); beyond this something hangs.
BUSY_TIMEOUT_S: Final = 10.0
#: The execution option that tells `tuner/store/engine.py` to begin a transaction that only reads.
READ_ONLY = "kitsune_read_only"


class Database:
    """An open database. `with database.begin() as connection:` is one transaction: all of it is kept, or nothing."""

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
        """A transaction that only reads; it waits for no writer. A write in it raises StoreError."""
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
        """Before the commit, so that nothing of the transaction is kept."""
        if fault_injection.struck("database-full"):
            raise StoreFullError(f"the database {shown(self.engine.url)} {FULL}")
        if fault_injection.struck("database-away"):
            raise StoreError(f"the database {shown(self.engine.url)} lost the connection; try again when it is back")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The threads of this process write to SQLite one after the other, in the order in which they came.

        SQLite has one writer at a time, and lets the others ask again and again, the luckiest first: of 100 clients
        that submitted through 40 threads one was answered after 12 s, and two not at all.
        """
        if self._turns is None:
            yield
            return
        if not self._turns.take(2 * self._busy_timeout_s):  # so that one that gives up leaves the next its own try
            raise StoreBusyError("other writers of this process kept the database for too long; try again")
        try:
            yield
        finally:
            self._turns.end()

    @contextmanager
    def _pool_errors(self) -> Iterator[None]:
        """Waiting for a connection of the pool is the one failure that no event tells of."""
        try:
            yield
        except PoolTimeoutError as error:
            raise StoreBusyError("every connection of this process to the database is in use; try again") from error
