"""Deletes runs older than the retention period in a background thread, at the start of the server and every hour."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from kitsune.errors import StoppedError, StoreError
from tuner.store.database import Database
from tuner.wall_clock import utcnow
from tuner.worker.purge import clear

EVERY_S: Final = 3600.0

log = logging.getLogger("kitsune.server")


@contextmanager
def deleting_old_runs(database: Database, days: float | None) -> Iterator[None]:
    """Deletes runs that ended more than `days` ago while this context is open; None keeps all.

    Several servers may do so on one database at once.
    """
    if days is None:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_delete_every_hour, args=(database, timedelta(days=days), is_over), name="kitsune-retention", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _delete_every_hour(database: Database, age: timedelta, is_over: threading.Event) -> None:
    def check() -> None:
        if is_over.is_set():
            raise StoppedError("the server ends")

    while not is_over.is_set():
        try:
            if cleared := clear(database, utcnow() - age, check=check):
                log.info("runs that ended more than %g days ago: %d deleted", age / timedelta(days=1), cleared)
        except StoppedError:
            return
        except StoreError as error:
            log.warning("old runs could not be deleted, will try again: %s", error)
        except Exception:  # the thread must survive any error, as the server does
            log.exception("old runs could not be deleted, will try again")
        is_over.wait(EVERY_S)
