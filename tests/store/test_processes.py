"""Many processes on one database, some of them killed."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import datetime
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from time import monotonic, sleep

import pytest

from tests.store.samples import START, a_run, a_trial, after
from tuner.records import Run, RunStatus
from tuner.store import runs, trials
from tuner.store.database import Database
from tuner.store.engine import open_database

WORKERS = 8
RUNS = 96

#: One process imports SQLAlchemy and the workers fork from it: 8 workers start in 0.2 s instead of 4 s.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tuner.store.engine", "tuner.store.runs", "tests.store.samples"])


def claim_all(url: str, start: Barrier, claimed: "Queue[list[tuple[str, int]]]") -> None:
    mine = []
    with open_database(url) as database:
        start.wait(30)
        while True:
            with database.begin() as connection:
                run = runs.claim(connection, f"worker {os.getpid()}")
            if run is None:
                break
            with database.begin() as connection:
                trials.add(connection, run, a_trial(run))
            with database.begin() as connection:
                runs.finish(connection, run)
            mine.append((run.id, run.attempt))
    claimed.put(mine)


def claim_and_hang(url: str, ready: "Queue[str]", *, commit: bool) -> None:
    """Claims a run for 60 s from START and stores trial 0; then trial 1 within a transaction that never ends."""
    with open_database(url) as database:
        with database.begin() as connection:
            run = runs.claim(connection, "doomed", lease_s=60, now=START)
            assert run is not None
            trials.add(connection, run, a_trial(run, 0))
            if not commit:
                ready.put(run.id)
                sleep(60)
        with database.begin() as connection:
            trials.add(connection, run, a_trial(run, 1))
            ready.put(run.id)
            sleep(60)


def only_open(url: str, start: Barrier) -> None:
    start.wait(30)
    open_database(url).close()


def killed(url: str, *, commit: bool) -> str:
    """The id of the run that a worker held when it was killed."""
    ready: Queue[str] = context.Queue()
    process = context.Process(target=claim_and_hang, args=(url, ready), kwargs={"commit": commit})
    process.start()
    run_id = ready.get(timeout=30)
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    return run_id


def together(target: Callable[..., None], url: str, *args: object) -> list[ForkServerProcess]:
    """The workers, started; they begin at once when all of them are ready."""
    start = context.Barrier(WORKERS + 1)
    processes = [context.Process(target=target, args=(url, start, *args)) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    start.wait(30)
    return processes


def all_well(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * WORKERS


def test_no_run_is_claimed_twice(url: str, database: Database) -> None:
    made = [a_run(created_at=after(number % 3)) for number in range(RUNS)]
    with database.begin() as connection:
        for run in made:
            runs.add(connection, run)
    claimed: Queue[list[tuple[str, int]]] = context.Queue()
    processes = together(claim_all, url, claimed)
    by_worker = [claimed.get(timeout=30) for _ in processes]
    all_well(processes)
    assert sorted(pair for mine in by_worker for pair in mine) == sorted((run.id, 1) for run in made)
    assert sum(bool(mine) for mine in by_worker) > 1, "one worker took everything: nothing was contended"
    with database.read() as connection:
        page = runs.page(connection, limit=RUNS + 1)
        assert {run.status for run in page.runs} == {RunStatus.FINISHED}
        assert all(len(trials.list_of(connection, run.id)) == 1 for run in page.runs)


def test_processes_that_open_an_empty_database_at_once(bare_url: str) -> None:
    all_well(together(only_open, bare_url))
    with open_database(bare_url) as database, database.begin() as connection:
        assert runs.claim(connection, "w") is None


def take_over(database: Database, now: datetime) -> Run:
    """PostgreSQL notices the death of a client, and gives up its locks, within a moment; claims pass by till then."""
    deadline = monotonic() + 15
    while monotonic() < deadline:
        with database.begin() as connection:
            taken = runs.claim(connection, "heir", now=now)
        if taken is not None:
            return taken
        sleep(0.02)
    pytest.fail("the run was never given to another worker")


def test_a_killed_workers_run_is_taken_over_after_its_lease(url: str, database: Database) -> None:
    run = a_run()
    with database.begin() as connection:
        runs.add(connection, run)
    assert killed(url, commit=True) == run.id
    with database.begin() as connection:
        assert runs.claim(connection, "heir", now=after(60)) is None
        assert trials.list_of(connection, run.id) == [a_trial(run, 0)], "trial 1 was never acknowledged"
    taken = take_over(database, after(60.001))
    assert (taken.id, taken.attempt, taken.worker) == (run.id, 2, "heir")


def test_a_worker_killed_in_the_middle_of_its_claim_leaves_no_trace(url: str, database: Database) -> None:
    run = a_run()
    with database.begin() as connection:
        runs.add(connection, run)
    assert killed(url, commit=False) == run.id
    with database.begin() as connection:
        assert runs.get(connection, run.id) == run
        assert trials.list_of(connection, run.id) == []
    assert take_over(database, START).attempt == 1
