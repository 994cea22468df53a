"""Run as a module on a small disk: carries a run out until the database finds no space, then with space once more."""

import sys
from pathlib import Path

from kitsune.errors import StoreFullError
from tests.store.carrying import carried_out, claimed, stored, taken_over
from tests.unit.tuner.machine import GRAPH_WINS, SMALL, Machine
from tuner.records import RunStatus
from tuner.settings import sqlite_url
from tuner.store.engine import open_database
from tuner.tuning.events import Event, Tried


def main(folder: Path) -> None:
    ballast = folder / "ballast"

    def fill(event: Event) -> None:
        """From the second trial on nothing is left."""
        if isinstance(event, Tried) and event.trial.number == 1:
            with ballast.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    return

    with open_database(sqlite_url(folder / "kitsune.db")) as database:
        run = claimed(database)
        try:
            carried_out(database, run, machine(), fill)
        except StoreFullError as error:
            sys.stdout.write(f"{error}\n")
        else:
            raise SystemExit("the disk was not full")
        left, tried = stored(database, run)
        assert len(tried) >= 2
        assert [trial.number for trial in tried] == list(range(left.trials))
        ballast.unlink()
        with database.read() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        ended, _ = carried_out(database, taken_over(database, run), machine())
        assert ended.status is RunStatus.FINISHED


def machine() -> Machine:
    return Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
