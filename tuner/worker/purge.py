"""Deletes old runs and unused archives in small steps, so that no step locks the database for long."""

from collections.abc import Callable
from datetime import datetime
from typing import Final

from kitsune.base.backoff import rest
from tuner.store.database import Database
from tuner.store.queries import retention

#: Runs and archives that are deleted per step.
RUNS_AT_ONCE: Final = 10
ARCHIVES_AT_ONCE: Final = 4
#: Pause after each step: SQLite has one writer at a time, and waiting writers poll every 0.1 s or less.
PAUSE_S: Final = 0.1


def clear(
    database: Database, before: datetime, *, with_plans: bool = False, check: Callable[[], None] = lambda: None
) -> int:
    """Deletes runs that ended before `before`, and archives that no run uses; returns the number of runs.

    `check` is called between steps; an exception from it propagates. Safe to run in several processes. Raises
    StoreError.
    """
    cleared = 0
    while deleted := _clear_runs(database, before, with_plans=with_plans):
        cleared += deleted
        rest(PAUSE_S, check)
    while _clear_archives(database, retention.latest_unused(before)):
        rest(PAUSE_S, check)
    return cleared


def _clear_runs(database: Database, before: datetime, *, with_plans: bool) -> int:
    with database.begin() as connection:
        return retention.delete_ended(connection, before, limit=RUNS_AT_ONCE, with_plans=with_plans)


def _clear_archives(database: Database, before: datetime) -> int:
    with database.read() as connection:
        unused = retention.unused_archives(connection, before, limit=ARCHIVES_AT_ONCE)
    if not unused:
        return 0
    with database.begin() as connection:
        return retention.delete_archives(connection, unused, before)
