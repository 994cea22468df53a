"""A worker and its queue on both databases; its children are those of a made-up machine."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, make_url, update

from kitsune.errors import StoppedError, StoreBusyError, StoreError, UnfitError
from tests.store.carrying import cancel, locked, raising, stored, taken_over, wait_until
from tests.store.conftest import Postgres
from tests.store.samples import a_run, after
from tests.unit.kitsune.submission.hostile import valid
from tests.unit.tuner.machine import ENVIRONMENT, GRAPH, GRAPH_WINS, SMALL, Machine, failure
from tuner.measuring.protocol import Job
from tuner.records import Run, RunStatus, Source, Trial
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.store.lease import Vigil
from tuner.store.queries import archives, runs, trials
from tuner.terminal.progress import Quiet
from tuner.tuning.events import Event, Started
from tuner.wall_clock import utcnow
from tuner.worker import worker as worker_module
from tuner.worker.run_execution import How
from tuner.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("short_pauses")

CONTENT = valid().to_bytes()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Teller(Quiet):
    """Remembers what was said, of all runs."""

    def __init__(self, said: list[str], hear: Callable[[Event], object]) -> None:
        super().__init__()
        self._said, self._hear = said, hear

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self._hear(event)

    def say(self, text: str) -> None:
        self._said.append(text)


class Hired:
    """A worker for tests: what it says, and what hears its events."""

    def __init__(self, database: Database, machine: Machine, home: Path, **changes: Any) -> None:
        self.said: list[str] = []
        self.hear: Callable[[Event], object] = lambda _: None
        self.worker = Worker(
            database,
            "cpu",
            ENVIRONMENT.gpu,
            home,
            self._teller,
            **{"make": machine.make, "vigil": Vigil(settle_s=0), **changes},
        )

    def _teller(self) -> Teller:
        return Teller(self.said, self.hear)

    def work_until(self, is_done: Callable[[], bool]) -> None:
        """In this thread; another one watches and asks the worker to stop."""

        def watch() -> None:
            try:
                wait_until(is_done)
            finally:
                self.worker.stop.ask()

        watcher = threading.Thread(target=watch)
        watcher.start()
        self.worker.work()
        watcher.join()
        assert is_done()


@pytest.fixture
def machine() -> Machine:
    return Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)


@pytest.fixture
def impatient(url: str) -> Iterator[Database]:
    """The database, opened so that it gives up on a lock soon."""
    with open_database(url, busy_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture
def hired(database: Database, machine: Machine, tmp_path: Path) -> Hired:
    return Hired(database, machine, tmp_path / "home")


def submitted(database: Database, number: int = 0, **changes: Any) -> Run:
    given = {"workload": runs.ARCHIVE, "archive": SHA256, "device": "", "budget_trials": 6}
    run = a_run(**{**given, "created_at": after(number), **changes})
    with database.begin() as connection:
        archives.put(connection, CONTENT, valid())
        runs.add(connection, run)
    return run


def status(database: Database, run: Run) -> RunStatus:
    return stored(database, run)[0].status


def searched(tried: list[Trial]) -> list[str]:
    """The configurations that were tried, without the confirmation."""
    return [words(trial.knobs) for trial in tried if trial.source is not Source.CONFIRM]


def at_child(number: int, act: Callable[[], object]) -> Callable[[int, Job], None]:
    """A machine's `answer` that acts while the child of this number runs."""

    def answer(child: int, _: Job) -> None:
        if child == number:
            act()

    return answer


def running(machine: Machine, begin: Callable[[], object]) -> Callable[[], None]:
    """A child that would run on and on after `begin`: only its worker's check can end it, within seconds."""

    def run() -> None:
        begin()
        end = time.monotonic() + 40
        while time.monotonic() < end:
            machine.check()
            time.sleep(0.02)
        pytest.fail("nothing ended the child")

    return run


@contextmanager
def held(url: str, is_noticed: Callable[[], bool]) -> Iterator[None]:
    """The database is locked from now on, until the worker has noticed."""
    is_locked = threading.Event()

    def hold() -> None:
        with locked(url):
            is_locked.set()
            wait_until(is_noticed)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_locked.wait(60)
    yield
    thread.join()


# Runs -----------------------------------------------------------------------------------------------------------------


def test_runs_are_carried_out_oldest_first_without_a_pause(database, hired, monkeypatch):
    made = [submitted(database, number) for number in (1, 0, 2)]
    rests: list[float] = []
    rest = worker_module.rest
    monkeypatch.setattr(worker_module, "rest", lambda seconds, check: (rests.append(seconds), rest(seconds, check)))
    hired.work_until(lambda: bool(rests))
    found = [stored(database, run)[0] for run in made]
    assert {run.status for run in found} == {RunStatus.FINISHED}, "it rested before the queue was empty"
    assert {(run.worker, run.device, run.attempt) for run in found} == {(hired.worker.name, "cpu", 1)}
    assert [line.split()[1] for line in hired.said] == [made[1].id, made[0].id, made[2].id]
    assert all(" has finished: " in line for line in hired.said)


def test_an_empty_queue_is_asked_at_longer_and_longer_intervals(hired, monkeypatch):
    rests: list[float] = []

    def rest(seconds: float, check: Callable[[], None]) -> None:
        rests.append(seconds)
        if len(rests) == 6:
            hired.worker.stop.ask()
        check()

    monkeypatch.setattr(worker_module, "rest", rest)
    hired.worker.work()
    for pause, whole in zip(rests, (0.5, 1, 2, 2, 2, 2), strict=True):
        assert whole / 2 <= pause <= whole


def test_the_children_load_the_archive_from_a_file(database, machine, hired, tmp_path):
    run = submitted(database, seed=7)
    assert hired.worker.work_once().how is How.FINISHED
    (spec,) = {job.workload for job in machine.jobs}
    assert spec == str(tmp_path / "home" / "archives" / f"{SHA256}.ksn")
    assert Path(spec).read_bytes() == CONTENT
    assert {(job.seed, job.device) for job in machine.jobs} == {(run.seed, "cpu")}


def test_a_workload_of_the_zoo_needs_no_file(database, machine, hired):
    submitted(database, workload="zoo:mlp", archive=None)
    assert hired.worker.work_once().how is How.FINISHED
    assert {job.workload for job in machine.jobs} == {"zoo:mlp"}


def test_what_is_not_for_this_worker_stays_in_the_queue(database, hired):
    for workload in ("train.py:make_workload", "model.ksn", runs.LIVE):
        submitted(database, workload=workload, archive=None)
    submitted(database, device="cuda")
    assert hired.worker.work_once() is None


def test_two_workers_of_one_process_have_two_names(database, machine, tmp_path):
    assert len({Hired(database, machine, tmp_path).worker.name for _ in range(50)}) == 50


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_does_not_stop_the_worker(database, machine, hired):
    failing, fine = submitted(database, 0), submitted(database, 1)

    def hear(event: Event) -> None:
        if isinstance(event, Started):
            outcome = failure("a wall") if event.run.id == failing.id else None
            machine.answer = lambda *_: outcome

    hired.hear = hear
    hired.work_until(lambda: status(database, fine) is RunStatus.FINISHED)
    found, tried = stored(database, failing)
    assert (found.status, found.error) == (RunStatus.FAILED, "all 6 trials failed; the first: a wall")
    assert len(tried) == 6
    assert hired.said[0] == f"run {failing.id} has failed: {found.error}"


def test_an_error_that_nobody_foresaw_does_not_stop_the_worker(database, machine, hired, caplog):
    failing, fine = submitted(database, 0), submitted(database, 1)
    machine.answer = at_child(2, raising(ZeroDivisionError("oops")))
    hired.work_until(lambda: status(database, fine) is RunStatus.FINISHED)
    found, tried = stored(database, failing)
    assert (found.status, found.error, len(tried)) == (RunStatus.FAILED, "oops", 2)
    assert "ZeroDivisionError" in caplog.text, "whoever mends it needs the traceback"


def test_an_archive_that_was_damaged_fails_its_run(database, machine, hired):
    run = submitted(database)
    with database.begin() as connection:
        connection.execute(update(tables.archives).values(content=CONTENT[:-1] + b"?"))
    assert hired.worker.work_once().how is How.FAILED
    found, _ = stored(database, run)
    assert found.status is RunStatus.FAILED
    assert SHA256 in found.error
    assert machine.jobs == []


def test_a_machine_that_can_carry_out_nothing_takes_no_run_down(database, hired, tmp_path):
    (tmp_path / "home").write_text("not a folder")
    run = submitted(database)
    with pytest.raises(UnfitError, match="KITSUNE_HOME"):
        hired.worker.work()
    found, _ = stored(database, run)
    assert (found.status, found.worker) == (RunStatus.QUEUED, None)


# Stopping, cancelling, losing -----------------------------------------------------------------------------------------


def test_a_worker_that_is_asked_to_stop_ends_its_trial_and_gives_the_run_back(database, machine, hired, tmp_path):
    run = submitted(database)
    machine.answer = at_child(3, running(machine, hired.worker.stop.ask))
    hired.worker.work()
    found, tried = stored(database, run)
    assert (found.status, found.worker, found.lease_until, len(tried)) == (RunStatus.QUEUED, None, None, 3)
    assert hired.said == [f"run {run.id} goes back into the queue: the worker was asked to end"]

    heir = Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)
    assert Hired(database, heir, tmp_path / "other").worker.work_once().how is How.FINISHED
    found, tried = stored(database, run)
    assert (found.status, found.attempt) == (RunStatus.FINISHED, 2)
    assert len(searched(tried)) == len(set(searched(tried))) == 6
    assert [trial.number for trial in tried] == list(range(len(tried)))
    assert len(heir.jobs) == 3 + PROCESSES, "what the first worker had stored was not measured again"


def test_a_worker_that_was_asked_to_stop_claims_nothing(database, hired):
    run = submitted(database)
    hired.worker.stop.ask()
    with pytest.raises(StoppedError):
        hired.worker.work_once()
    hired.worker.work()
    assert stored(database, run)[0] == run


@pytest.mark.parametrize(("how", "word"), [(cancel, "was cancelled"), (taken_over, "took it over")])
def test_a_run_that_is_lost_ends_its_trial_and_the_worker_goes_on(database, machine, hired, how, word):
    lost, fine = submitted(database, 0), submitted(database, 1)
    machine.answer = at_child(2, running(machine, lambda: how(database, lost)))
    hired.work_until(lambda: status(database, fine) is RunStatus.FINISHED)
    found, tried = stored(database, lost)
    assert found.status is (RunStatus.CANCELLED if how is cancel else RunStatus.RUNNING)
    assert (len(tried), found.plan_id) == (2, None)
    assert hired.said[0].startswith(f"run {lost.id} is no longer ours: ")
    assert word in hired.said[0]


def test_a_run_whose_worker_vanished_is_taken_over(database, hired):
    run = submitted(database)
    with database.begin() as connection:
        assert runs.claim(connection, "gone", device="cpu", now=utcnow() - timedelta(hours=1)) is not None
    assert hired.worker.work_once().how is How.FINISHED
    assert stored(database, run)[0].attempt == 2


# A database that is away ----------------------------------------------------------------------------------------------


def test_a_database_that_is_away_while_the_queue_is_asked(url, impatient, machine, tmp_path):
    run = submitted(impatient)
    hired = Hired(impatient, machine, tmp_path)
    with held(url, lambda: bool(hired.said)):
        hired.work_until(lambda: any(" has finished: " in line for line in hired.said))
    assert status(impatient, run) is RunStatus.FINISHED
    assert hired.said[0].startswith("No run can be claimed, will try again: the database "), "the lock hit nothing"


def test_a_database_that_is_away_while_a_trial_is_to_be_stored(url, impatient, machine, tmp_path, caplog):
    """It is stored as soon as the database is back, and not measured again."""
    run = submitted(impatient)
    holding = held(url, lambda: "will be written again" in caplog.text)
    machine.answer = at_child(2, holding.__enter__)
    with caplog.at_level(logging.WARNING, "kitsune"):
        assert Hired(impatient, machine, tmp_path).worker.work_once().how is How.FINISHED
    holding.__exit__(None, None, None)
    assert f"run {run.id} will be written again: " in caplog.text
    found, tried = stored(impatient, run)
    assert (found.status, found.attempt) == (RunStatus.FINISHED, 1)
    assert len(tried) == len(machine.jobs) == 6 + PROCESSES


def test_a_database_that_is_away_for_longer_than_the_lease(url, impatient, machine, tmp_path):
    """The worker lets go of the run; it or another worker goes on when the database is back."""
    run = submitted(impatient)
    hired = Hired(impatient, machine, tmp_path, lease_s=3)
    holding = held(url, lambda: bool(hired.said))
    machine.answer = at_child(2, holding.__enter__)
    hired.work_until(lambda: any(" has finished: " in line for line in hired.said))
    holding.__exit__(None, None, None)
    assert hired.said[0].startswith(f"run {run.id} cannot be written to, so it waits for a worker: ")
    found, tried = stored(impatient, run)
    assert (found.status, found.attempt) == (RunStatus.FINISHED, 2)
    assert len(searched(tried)) == len(set(searched(tried))) == 6
    assert words(machine.jobs[-1].arms[-1].knobs) == GRAPH


def test_a_stop_is_heard_while_the_database_is_away(url, impatient, machine, tmp_path):
    hired = Hired(impatient, machine, tmp_path)
    with locked(url):
        hired.work_until(lambda: bool(hired.said))


def test_a_server_that_refuses_connections_for_a_while(postgres: Postgres, machine, tmp_path, caplog):
    """As when it restarts: connections break, and new ones are not to be had."""
    url = postgres.create()
    name = make_url(url).database

    def come_back() -> None:
        wait_until(lambda: "will be written again" in caplog.text)
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    back = threading.Thread(target=come_back)

    def go_away() -> None:
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        back.start()

    with open_database(url) as opened, caplog.at_level(logging.WARNING, "kitsune"):
        run = submitted(opened)
        machine.answer = at_child(2, go_away)
        assert Hired(opened, machine, tmp_path).worker.work_once().how is How.FINISHED
        assert f"run {run.id} will be written again: the database " in caplog.text
        found, tried = stored(opened, run)
        assert (found.status, found.attempt) == (RunStatus.FINISHED, 1)
        assert len(tried) == len(machine.jobs) == 6 + PROCESSES
    back.join()


@pytest.mark.parametrize("error", [StoreError("no connection"), StoreBusyError("locked")])
def test_what_is_written_twice_counts_once(database, machine, hired, monkeypatch, error):
    """The answer to a commit was lost: the worker cannot know that its trial is stored."""
    run = submitted(database)
    add, lost = trials.add, iter([error, error])

    def stored_but_not_told(connection: Connection, run: Run, trial: Trial) -> bool:
        is_new = add(connection, run, trial)
        if trial.number == 3 and (trouble := next(lost, None)) is not None:
            connection.commit()
            raise trouble
        return is_new

    monkeypatch.setattr(trials, "add", stored_but_not_told)
    assert hired.worker.work_once().how is How.FINISHED
    assert next(lost, None) is None
    assert [trial.number for trial in stored(database, run)[1]] == list(range(6 + PROCESSES))
    assert len(machine.jobs) == 6 + PROCESSES
