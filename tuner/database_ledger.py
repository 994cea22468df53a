"""The runs of a database, as `kitsune runs` reads them."""

import contextlib
from collections.abc import Iterator, Sequence

from kitsune.plan import Plan
from tuner.records import Run, RunStatus, Trial
from tuner.settings import Settings
from tuner.store import plans, runs, trials
from tuner.store.database import Database
from tuner.store.engine import open_database


class DatabaseLedger:
    """See `tuner.history.Ledger`. Every question is a transaction of its own."""

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


@contextlib.contextmanager
def opened(database_url: str | None) -> Iterator[DatabaseLedger]:
    with open_database(database_url or Settings.from_environment().database_url) as database:
        yield DatabaseLedger(database)
