"""Workers as processes, on the CPU: what becomes of runs whose workers are killed, stopped or asked to end.

Where a trial must be caught in the middle, its measuring process is stopped: then nothing but the worker can end it.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kitsune.errors import StoreBusyError
from tests.e2e.command import Command
from tests.processes import children, is_gone, measuring, state
from tests.unit.kitsune.submission.steps import archive_of
from tuner.records import Run, RunStatus, Trial
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.queries import archives, runs, trials
from tuner.store.queries.submits import Request, submit

PATIENCE_S = 240.0  # a child loads torch for 3 to 7 s on an idle core, and there are several
SOON_S = 30.0
LONG_AGO = datetime(2024, 1, 31, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with open_database(url) as opened:
        yield opened


@pytest.fixture
def hire(tmp_path: Path, url: str) -> Iterator[Callable[..., Command]]:
    """Starts workers on the one database, each with a KITSUNE_HOME of its own as on a machine of its own."""
    hired: list[Command] = []

    def start(*words: str) -> Command:
        folder = tmp_path / f"worker{len(hired)}"
        words = ("worker", "--device", "cpu", "--database", url, *words)
        hired.append(Command(folder, *words, CXX="/no/compiler"))  # or the second trial takes a minute
        return hired[-1]

    yield start
    for command in hired:
        left = children(command.process.pid) if command.process.poll() is None else set()
        command.close()
        for child in left:  # one that a failed test has left stopped cannot see that its worker is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def submitted(database: Database, **changes: Any) -> Run:
    archive = archive_of("mlp")
    with database.begin() as connection:
        stored, _ = archives.put(connection, archive.to_bytes(), archive)
        run, is_new = submit(connection, Request(archive=stored.sha256, **{"trials": 1, **changes}), owner="me")
    assert is_new
    return run


def found(database: Database, run: Run) -> tuple[Run, list[Trial]]:
    with database.read() as connection:
        current = runs.get(connection, run.id)
        assert current is not None
        return current, trials.list_of(connection, run.id)


def attempts(database: Database, run: Run) -> list[int]:
    """Who stored each trial."""
    trial = tables.trials.c
    with database.read() as connection:
        chosen = select(trial.attempt).where(trial.run_id == run.id).order_by(trial.number)
        return list(connection.scalars(chosen))


def wait_until(is_so: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def is_finished(database: Database, run: Run) -> bool:
    return found(database, run)[0].status is RunStatus.FINISHED


def caught(worker: Command) -> set[int]:
    """The worker's measuring processes, stopped: the one in the middle of its trial, and those that wait for a job.

    One that starts from now on has nothing to do before that trial ends.
    """
    seen: set[int] = set()  # while it becomes another program, a process has no command line

    def are_stopped() -> bool:
        assert worker.process.poll() is None, worker.err.read_text()
        current = measuring(worker.process.pid)
        for child in current - seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
        seen.update(current)
        return bool(current) and all(state(child) == "T" for child in current)

    wait_until(are_stopped)
    return {child for child in seen if state(child) == "T"}


def put_to_sleep(worker: Command, url: str) -> None:
    """Stopped, and not in the middle of a write: there (6 of 400 times) it would keep SQLite's lock from all others."""
    while True:
        worker.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(worker.process.pid) == "T", SOON_S)
        with contextlib.suppress(StoreBusyError), open_database(url, busy_timeout_s=1.0) as other, other.begin():
            return
        worker.process.send_signal(signal.SIGCONT)


def go_on(stopped: set[int]) -> None:
    for child in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGCONT)


def caught_after(worker: Command, database: Database, run: Run, number: int) -> set[int]:
    """The same, in the trial after so many that are stored."""
    wait_until(lambda: len(found(database, run)[1]) == number)
    return caught(worker)


def assert_each_trial_counts_once(database: Database, run: Run) -> None:
    current, tried = found(database, run)
    assert [trial.number for trial in tried] == list(range(len(tried)))
    searched = [trial for trial in tried if trial.source.is_search]
    assert len(searched) == len({tuple(sorted(trial.knobs.items())) for trial in searched}) == current.budget_trials


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_two_workers_share_two_runs(database, hire):
    made = [submitted(database, seed=seed) for seed in range(2)]
    workers = [hire(), hire()]
    wait_until(lambda: all(is_finished(database, run) for run in made))
    done = [found(database, run)[0] for run in made]
    assert {run.attempt for run in done} == {1}
    assert len({run.worker for run in done}) == 2, "one worker did it all: nothing was shared"
    for run in made:
        assert_each_trial_counts_once(database, run)
    for worker in workers:
        worker.process.terminate()
        code, out, err = worker.wait(SOON_S)
        assert (code, out) == (0, "")
        assert "has finished: " in err
        assert "[1 of 1] " in err


@pytest.mark.timeout(400)
@pytest.mark.minutes
def test_a_worker_that_is_killed_is_replaced_and_no_trial_counts_twice(database, hire):
    run = submitted(database, trials=2)
    victim = hire("--lease", "4s")
    caught_ones = caught_after(victim, database, run, 1)
    before, tried = found(database, run)
    victim.process.kill()
    assert victim.process.wait(SOON_S) == -signal.SIGKILL
    assert (before.status, before.attempt, len(tried)) == (RunStatus.RUNNING, 1, 1)
    go_on(caught_ones)  # one that was stopped before it asked to die with its parent sees so by itself
    assert all(is_gone(child, SOON_S) for child in caught_ones), "a measuring process outlives its worker"

    heir = hire()
    wait_until(lambda: is_finished(database, run))
    after, all_tried = found(database, run)
    assert after.attempt == 2
    assert after.worker != before.worker
    assert all_tried[0] == tried[0], "what the first worker stored stays, and is not tried again"
    assert attempts(database, run)[:2] == [1, 2]
    assert_each_trial_counts_once(database, run)
    assert heir.process.poll() is None


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_a_worker_that_slept_beyond_its_lease_writes_nothing(database, url, hire):
    run = submitted(database, trials=2)
    sleeper = hire("--lease", "3s")
    caught_ones = caught_after(sleeper, database, run, 1)
    put_to_sleep(sleeper, url)
    go_on(caught_ones)  # without a compiler the trial needs no turn to be timed: it answers to a worker that sleeps

    heir = hire()
    wait_until(lambda: found(database, run)[0].attempt == 2)
    wait_until(lambda: any(state(child) == "Z" for child in caught_ones))
    sleeper.process.send_signal(signal.SIGCONT)
    sleeper.wait_for(f"run {run.id} is no longer ours: ", SOON_S)
    assert all(map(is_gone, caught_ones))
    wait_until(lambda: is_finished(database, run))
    assert "attempt 2" in sleeper.err.read_text()
    assert attempts(database, run)[0] == 1
    assert set(attempts(database, run)[1:]) == {2}
    assert_each_trial_counts_once(database, run)
    for worker in (sleeper, heir):
        worker.process.terminate()
        assert worker.wait(SOON_S)[0] == 0, "it went on to wait for the next run"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.minutes)]
)
def test_a_worker_that_is_asked_to_end_gives_its_run_back_at_once(number, code, database, hire):
    run = submitted(database)
    worker = hire()
    caught_ones = caught(worker)
    worker.process.send_signal(number)
    left, out, err = worker.wait(SOON_S)
    assert (left, out) == (code, "")
    assert err.splitlines()[-1] == f"run {run.id} goes back into the queue: the worker was asked to end"
    assert all(map(is_gone, caught_ones))
    current, tried = found(database, run)
    assert (current.status, current.worker, current.lease_until, tried) == (RunStatus.QUEUED, None, None, [])


@pytest.mark.timeout(400)
def test_a_run_that_is_cancelled_stops_within_seconds_and_the_worker_goes_on(database, hire):
    run = submitted(database)
    worker = hire()
    caught_ones = caught(worker)
    with database.begin() as connection:
        assert runs.cancel(connection, run.id) is not None
    worker.wait_for(f"run {run.id} is no longer ours: run {run.id} was cancelled", SOON_S)
    assert all(is_gone(child, SOON_S) for child in caught_ones)
    current, tried = found(database, run)
    assert (current.status, tried) == (RunStatus.CANCELLED, [])
    another = submitted(database, seed=1)
    wait_until(lambda: found(database, another)[0].status is RunStatus.RUNNING)


@pytest.mark.timeout(400)
def test_once_carries_out_one_run_and_tells_by_its_exit_code_how_it_ended(database, hire):
    bad = submitted(database).evolve(id="bad", workload="zoo:nope", archive=None, created_at=LONG_AGO)
    with database.begin() as connection:
        runs.add(connection, bad)
    code, out, err = hire("--once").wait()
    current, _ = found(database, bad)
    assert (code, out, current.status) == (5, "", RunStatus.FAILED)
    assert "the zoo has no 'nope'" in str(current.error)
    assert err.splitlines()[-1] == f"run bad has failed: {current.error}"
    code, _, err = hire("--once").wait(PATIENCE_S)
    assert code == 0
    assert "has finished: " in err.splitlines()[-1]
    code, _, err = hire("--once").wait()
    assert (code, err.splitlines()[-1]) == (0, "The queue holds no run for this device.")
