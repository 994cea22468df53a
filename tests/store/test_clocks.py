"""Clocks that are wrong: whose run may be taken over then, and who is sent away at the start."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from kitsune.cli import main
from tests.store.carrying import claimed
from tests.store.conftest import Postgres
from tuner import fault_injection
from tuner.records import Run, RunStatus
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.lease import Vigil
from tuner.store.moments import MOST_SKEW_S, check_clock, skew_s
from tuner.store.queries import runs
from tuner.wall_clock import utcnow

HOUR_S = 3600


class Clock:
    """A monotonic one, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    yield
    fault_injection.plant(())


def jump(seconds: float) -> None:
    fault_injection.plant(fault_injection.parsed(f"clock-ahead={seconds}"))


def taken(database: Database, vigil: Vigil | None) -> Run | None:
    with database.begin() as connection:
        return runs.claim(connection, "fast", device="cpu", vigil=vigil)


def beat(database: Database, run: Run) -> None:
    """By a worker whose clock is right."""
    with database.begin() as connection:
        runs.heartbeat(connection, run, now=utcnow() - timedelta(seconds=fault_injection.seconds("clock-ahead")))


def test_a_worker_three_minutes_fast_steals_nothing_on_postgresql(postgres: Postgres, caplog) -> None:
    """A file is on one machine, which has one clock."""
    with open_database(postgres.create()) as database:
        run = claimed(database, workload="zoo:mlp")
        jump(180)
        assert (utcnow() - timedelta(seconds=170)).timestamp() > run.heartbeat_at.timestamp()  # so the fault has struck
        assert "planted fault clock-ahead=180 strikes" in caplog.text
        assert taken(database, None) is None
        assert skew_s(database) > 170


@pytest.mark.parametrize("seconds", [180, HOUR_S, -HOUR_S])
def test_a_clock_that_jumps_has_no_living_worker_lose_its_run(database: Database, seconds: float, caplog) -> None:
    """Judged by a rival of that clock, for an hour of its own; once the worker dies, it is taken over."""
    run, clock = claimed(database, workload="zoo:mlp"), Clock()
    vigil = Vigil(clock=clock)
    jump(seconds)
    for _ in range(60):
        clock.now_s += 2
        beat(database, run)
        assert taken(database, vigil) is None
    assert f"planted fault clock-ahead={seconds} strikes" in caplog.text
    if database.engine.dialect.name == "postgresql":
        return  # by the database's clock it ends with the lease
    clock.now_s += 6
    heir = taken(database, vigil)
    assert heir is not None
    assert (heir.id, heir.attempt, heir.deaths) == (run.id, 2, 1)


@pytest.mark.parametrize(("seconds", "way"), [(HOUR_S, "3600 s ahead of"), (-180, "180 s behind")])
def test_a_host_far_off_the_databases_clock_is_sent_away(url: str, seconds: float, way: str, capsys, monkeypatch):
    is_shared = url.startswith("postgresql")
    monkeypatch.setenv("KITSUNE_FAULTS", f"clock-ahead={seconds}")
    code = main.run(["worker", "--once", "--device", "cpu", "--database", url])
    said = capsys.readouterr().err
    assert code == (3 if is_shared else 0)
    assert (f"the clock of this machine is {way}" in said) is is_shared
    assert "Traceback" not in said


def test_a_host_that_is_a_little_off_may_work(url: str) -> None:
    with open_database(url) as database:
        jump(MOST_SKEW_S / 2)
        check_clock(database)


def test_a_run_of_a_dead_worker_is_taken_over_by_the_databases_clock(database: Database) -> None:
    run, clock = claimed(database, workload="zoo:mlp"), Clock()
    with database.begin() as connection:
        runs.heartbeat(connection, run, lease_s=-1)
    vigil = Vigil(clock=clock)
    assert taken(database, vigil) is None
    clock.now_s += 4.9
    assert taken(database, vigil) is None
    clock.now_s += 0.2
    heir = taken(database, vigil)
    assert heir is not None
    assert (heir.status, heir.attempt, heir.deaths) == (RunStatus.RUNNING, 2, 1)
