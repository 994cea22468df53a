"""Many processes on one database, some of them killed."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from datetime import datetime
from itertools import count
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.synchronize import Barrier
from time import monotonic, sleep

import pytest

from tests.store.samples import START, a_run, a_trial, after, an_archive
from tuner.records import Run, RunStatus
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import archives, runs, submits, trials
from tuner.store.queries.submits import Request

WORKERS = 8
RUNS = 96
SUBMITS = 10
PATIENCE_S = 100.0  # where a commit takes 0.1 s, eight that ask SQLite again and again wait long for their turn

#: One process imports SQLAlchemy and the workers fork from it: 8 workers start in 0.2 s instead of 4 s.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tuner.store.engine", "tuner.store.queries.submits", "tests.store.samples"])


def claim_all(url: str, start: Barrier, claimed: "Queue[list[tuple[str, int]]]") -> None:
    mine = []
    with open_database(url, busy_timeout_s=PATIENCE_S) as database:
        start.wait(120)
        while True:
            with database.begin() as connection:
                run = runs.claim(connection, f"worker {os.getpid()}", device="cpu")
            if run is None:
                break
            with database.begin() as connection:
                trials.add(connection, run, a_trial(run))
            with database.begin() as connection:
                runs.finish(connection, run)
            mine.append((run.id, run.attempt))
            sleep(0.002)  # real runs take longer; SQLite's lock goes to whoever asks at the right moment, not in turn
    claimed.put(mine)


def claim_and_hang(url: str, ready: "Queue[str]", *, commit: bool) -> None:
    """Claims a run for 60 s from START and stores trial 0; then trial 1 within a transaction that never ends."""
    with open_database(url, busy_timeout_s=PATIENCE_S) as database:
        with database.begin() as connection:
            run = runs.claim(connection, "doomed", device="cpu", lease_s=60, now=START)
            assert run is not None
            trials.add(connection, run, a_trial(run, 0))
            if not commit:
                ready.put(run.id)
                sleep(60)
        with database.begin() as connection:
            trials.add(connection, run, a_trial(run, 1))
            ready.put(run.id)
            sleep(60)


def put_and_submit(
    url: str, start: Barrier, answers: "Queue[list[tuple[bool, str, bool]]]", again: Barrier, *, has_key: bool
) -> None:
    """Sends an archive and ten requests, each at the moment at which every other worker does."""
    step, given = an_archive(), []
    content = step.to_bytes()
    with open_database(url, busy_timeout_s=PATIENCE_S) as database:
        start.wait(120)
        for seed in range(SUBMITS):
            with database.begin() as connection:
                stored, is_new_archive = archives.put(connection, content, step)
            request = Request(archive=stored.sha256, seed=seed)
            again.wait(120)
            with database.begin() as connection:
                run, is_new = submits.submit(connection, request, owner="ann", key=f"k{seed}" if has_key else None)
            given.append((is_new_archive, run.id, is_new))
    answers.put(given)


def submit_until_killed(url: str, sha256: str, acknowledged: "SimpleQueue[str]") -> None:
    with open_database(url, busy_timeout_s=PATIENCE_S) as database:
        for number in count():
            with database.begin() as connection:
                run, _ = submits.submit(connection, Request(archive=sha256), owner="ann", key=f"k{number}")
            acknowledged.put(run.id)


def only_open(url: str, start: Barrier) -> None:
    start.wait(120)
    open_database(url, busy_timeout_s=PATIENCE_S).close()


def killed(url: str, *, commit: bool) -> str:
    """The id of the run that a worker held when it was killed."""
    ready: Queue[str] = context.Queue()
    process = context.Process(target=claim_and_hang, args=(url, ready), kwargs={"commit": commit})
    process.start()
    run_id = ready.get(timeout=150)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    return run_id


def together(target: Callable[..., None], url: str, *args: object, **kwargs: object) -> list[ForkServerProcess]:
    """The workers, started; they begin at once when all of them are ready."""
    start = context.Barrier(WORKERS + 1)
    processes = [context.Process(target=target, args=(url, start, *args), kwargs=kwargs) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    start.wait(120)
    return processes


def all_well(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * WORKERS


def test_no_run_is_claimed_twice(url: str, database: Database) -> None:
    made = [a_run(created_at=after(number % 3)) for number in range(RUNS)]
    with database.begin() as connection:
        for run in made:
            runs.add(connection, run)
    claimed: Queue[list[tuple[str, int]]] = context.Queue()
    processes = together(claim_all, url, claimed)
    by_worker = [claimed.get(timeout=150) for _ in processes]
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
        assert runs.claim(connection, "w", device="cpu") is None


@pytest.mark.parametrize("has_key", [True, False])
def test_the_same_request_of_many_processes_is_one_run(url: str, database: Database, has_key: bool) -> None:
    answers: Queue[list[tuple[bool, str, bool]]] = context.Queue()
    processes = together(put_and_submit, url, answers, context.Barrier(WORKERS), has_key=has_key)
    by_worker = [answers.get(timeout=150) for _ in processes]
    all_well(processes)
    assert sum(is_new_archive for given in by_worker for is_new_archive, _, _ in given) == 1
    for seed in range(SUBMITS):
        assert len({given[seed][1] for given in by_worker}) == 1
        assert sum(given[seed][2] for given in by_worker) == 1
    with database.read() as connection:
        found = runs.page(connection, limit=RUNS).runs
    assert {run.id for run in found} == {run_id for _, run_id, _ in by_worker[0]}
    assert len(found) == SUBMITS


def test_a_submit_is_kept_once_it_is_acknowledged_whatever_kills_the_process(url: str, database: Database) -> None:
    step = an_archive()
    with database.begin() as connection:
        sha256 = archives.put(connection, step.to_bytes(), step)[0].sha256
    acknowledged: SimpleQueue[str] = context.SimpleQueue()
    process = context.Process(target=submit_until_killed, args=(url, sha256, acknowledged))
    process.start()
    told = [acknowledged.get() for _ in range(5)]
    process.kill()
    process.join(60)
    while not acknowledged.empty():
        told.append(acknowledged.get())
    with database.begin() as connection:
        kept = {run.id for run in runs.page(connection, limit=1000).runs}
        again = [
            submits.submit(connection, Request(archive=sha256), owner="ann", key=f"k{n}") for n in range(len(told))
        ]
    assert set(told) <= kept
    assert [(run.id, is_new) for run, is_new in again] == [(run_id, False) for run_id in told]


def take_over(database: Database, now: datetime) -> Run:
    """PostgreSQL notices the death of a client, and gives up its locks, within a moment; claims pass by till then."""
    deadline = monotonic() + 60
    while monotonic() < deadline:
        with database.begin() as connection:
            taken = runs.claim(connection, "heir", device="cpu", now=now)
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
        assert runs.claim(connection, "heir", device="cpu", now=after(60)) is None
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
