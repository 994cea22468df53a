"""An engine in, transactions out: one for writing, one for reading, each committed at its edge."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from kitsune.errors import StoreBusyError

#: The execution option that tells `tuner/store/engine.py` to begin a transaction that only reads.
READ_ONLY = "kitsune_read_only"


class Database:
    """An open database. `with database.begin() as connection:` is one transaction: all of it is kept, or nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction that may write. Raises StoreBusyError when others keep the database locked."""
        with self._pool_errors(), self.engine.begin() as connection:
            yield connection

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

    @contextmanager
    def _pool_errors(self) -> Iterator[None]:
        """Waiting for a connection of the pool is the one failure that no event tells of."""
        try:
            yield
        except PoolTimeoutError as error:
            raise StoreBusyError("every connection of this process to the database is in use; try again") from error
