"""Access to runs in a database, for `kitsune runs`."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime

from kitsune.plan import Plan
from tuner.records import Run, RunStatus, Trial
from tuner.settings import Settings
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import plans, retention, runs, trials
from tuner.worker.purge import clear


class DatabaseLedger:
    """A `tuner.commands.runs.Ledger` of a database. Each call is one transaction."""

    how_to_begin = "kitsune tune 'zoo:lenet5?batch=64' --trials 12"

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(
        self, *, status: RunStatus | None = None, after: str | None = None, limit: int
    ) -> tuple[Sequence[Run], str | None]:
        with self._database.read() as connection:
            page = runs.page(connection, status=status, after=after, limit=limit)
        return page.runs, page.after

    def run(self, run_id: str) -> Run | None:
        with self._database.read() as connection:
            return runs.get(connection, run_id)

    def trials(self, run_id: str, after: int = -1) -> Sequence[Trial]:
        with self._database.read() as connection:
            return trials.list_of(connection, run_id, after=after)

    def plan(self, plan_id: str) -> Plan | None:
        with self._database.read() as connection:
            return plans.get(connection, plan_id)

    def cancel(self, run_id: str) -> Run | None:
        with self._database.begin() as connection:
            return runs.cancel(connection, run_id)

    def delete(self, run_id: str, *, with_plan: bool) -> object:
        with self._database.begin() as connection:
            return retention.delete_run(connection, run_id, with_plan=with_plan)

    def count_ended(self, before: datetime) -> tuple[int, int]:
        with self._database.read() as connection:
            return retention.count_ended(connection, before)

    def delete_ended(self, before: datetime, *, with_plans: bool) -> int:
        return clear(self._database, before, with_plans=with_plans)


@contextlib.contextmanager
def opened(database_url: str | None) -> Iterator[DatabaseLedger]:
    with open_database(database_url or Settings.from_environment().database_url) as database:
        yield DatabaseLedger(database)
