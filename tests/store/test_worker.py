"""A claimed run carried out on both databases; its children are those of a made-up machine."""

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
from sqlalchemy import event, func, select, text

from kitsune.errors import BaselineError, LeaseLostError, NoTrialError, StoreBusyError, StoreFullError
from tests.store.carrying import (
    cancel,
    carried_out,
    claimed,
    locked,
    on_confirmed,
    on_trial,
    raising,
    stored,
    taken_over,
    wait_until,
)
from tests.store.conftest import Postgres
from tests.unit.tuner.machine import GRAPH, GRAPH_WINS, SMALL, Machine, failure
from tuner.measuring.protocol import Job
from tuner.records import Run, RunStatus, Source, Verdict
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import PROCESSES
from tuner.store import tables
from tuner.store.engine import open_database
from tuner.store.queries import runs
from tuner.tuning.events import Event, Inspected, Tried
from tuner.wall_clock import utcnow
from tuner.worker import run_execution

pytestmark = pytest.mark.usefixtures("short_pauses")


class PowerCutError(BaseException):
    """Nobody catches it: what a process that dies leaves behind."""


@pytest.fixture
def machine() -> Machine:
    return Machine(step_ms=GRAPH_WINS, inapplicable=SMALL)


# To its end -----------------------------------------------------------------------------------------------------------


def test_a_run_is_carried_out_and_everything_is_kept(database, machine):
    run = claimed(database)
    finished, conclusion = carried_out(database, run, machine)
    found, tried = stored(database, run)
    assert found == finished
    assert (found.status, found.verdict, found.fingerprint) == (RunStatus.FINISHED, Verdict.FASTER, "f")
    assert found.inapplicable == SMALL
    assert found.environment == conclusion.plan.environment
    assert [trial.source is Source.CONFIRM for trial in tried] == [False] * 6 + [True] * PROCESSES
    assert all(trial.measurement is not None for trial in tried)
    with database.read() as connection:
        assert connection.execute(select(tables.plans.c.plan_id)).all() == [(found.plan_id,)]
    assert found.plan_id == conclusion.plan.plan_id
    assert words(conclusion.plan.knobs) == GRAPH


def test_what_is_told_is_stored_already(database, machine):
    run = claimed(database)
    told: list[Event] = []

    def tell(event: Event) -> None:
        told.append(event)
        found, tried = stored(database, run)
        assert tried == [event.trial for event in told if isinstance(event, Tried)]
        assert bool(found.fingerprint) == any(isinstance(event, Inspected) for event in told)

    carried_out(database, run, machine, tell)
    assert len([event for event in told if isinstance(event, Tried)]) == 6 + PROCESSES


def test_a_failed_trial_is_stored_with_its_reason(database, machine):
    run = claimed(database)
    machine.answer = lambda number, _: failure("a wall") if number == 2 else None
    carried_out(database, run, machine)
    _, tried = stored(database, run)
    assert [trial.failure.reason if trial.failure else None for trial in tried].count("a wall") == 1
    assert tried[2].failure == failure("a wall")


# To a bad end ---------------------------------------------------------------------------------------------------------


def test_a_workload_that_fails_is_stored_as_such(database, machine):
    run = claimed(database)
    machine.inspect = lambda *_, **__: failure("no such luck")
    with pytest.raises(BaselineError):
        carried_out(database, run, machine)
    found, tried = stored(database, run)
    assert (found.status, found.error, tried) == (RunStatus.FAILED, "the workload fails as given: no such luck", [])


def test_a_run_whose_trials_all_fail(database, machine):
    run = claimed(database)
    machine.answer = lambda *_: failure("a wall")
    with pytest.raises(NoTrialError):
        carried_out(database, run, machine)
    found, tried = stored(database, run)
    assert (found.status, found.error) == (RunStatus.FAILED, "all 6 trials failed; the first: a wall")
    assert len(tried) == 6


@pytest.mark.parametrize(("error", "reason"), [(ZeroDivisionError("oops"), "oops"), (ValueError(), "ValueError")])
def test_an_error_that_nobody_foresaw(database, machine, error, reason):
    run = claimed(database)
    with pytest.raises(type(error)):
        carried_out(database, run, machine, on_trial(2, raising(error)))
    found, tried = stored(database, run)
    assert (found.status, found.error, len(tried)) == (RunStatus.FAILED, reason, 2)


# Interrupts -----------------------------------------------------------------------------------------------------------


def interrupted_at(number: int) -> Callable[[int, Job], None]:
    def answer(child: int, _: Job) -> None:
        if child == number:
            raise KeyboardInterrupt

    return answer


def test_an_interrupted_search_keeps_the_best(database, machine):
    run = claimed(database)
    machine.answer = interrupted_at(5)
    finished, conclusion = carried_out(database, run, machine)
    assert conclusion.interrupted
    assert (finished.status, words(conclusion.plan.knobs)) == (RunStatus.FINISHED, GRAPH)
    assert len(stored(database, run)[1]) == 5 + PROCESSES


@pytest.mark.parametrize("confirmed", [0, PROCESSES - 1])
def test_an_interrupted_confirmation_puts_the_run_back(database, machine, confirmed):
    run = claimed(database)
    machine.answer = interrupted_at(6 + confirmed)
    with pytest.raises(KeyboardInterrupt):
        carried_out(database, run, machine)
    found, tried = stored(database, run)
    assert (found.status, found.worker, found.plan_id, len(tried)) == (RunStatus.QUEUED, None, None, 6 + confirmed)


def test_a_live_model_cannot_be_put_back(database, machine):
    run = claimed(database, workload=runs.LIVE)
    machine.answer = interrupted_at(6)
    with pytest.raises(KeyboardInterrupt):
        carried_out(database, run, machine)
    found, _ = stored(database, run)
    assert found.status is RunStatus.FAILED
    assert "interrupted" in str(found.error)


def test_an_interrupt_is_not_hidden_by_a_claim_that_is_void(database, machine, caplog):
    run = claimed(database)

    def cancel_and_interrupt() -> None:
        cancel(database, run)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carried_out(database, run, machine, on_trial(1, cancel_and_interrupt))
    assert stored(database, run)[0].status is RunStatus.CANCELLED
    assert "could not be stored" in caplog.text


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("died_after", [0, 3, 6, 7, 6 + PROCESSES])
def test_another_worker_goes_on_with_what_is_stored(database, machine, died_after):
    """7: the confirmation had begun. 6 + PROCESSES: all of it was stored, the end of the run was not."""
    run = claimed(database)
    count = iter(range(1, 100))

    def tell(event: Event) -> None:
        if isinstance(event, Tried) and next(count) == died_after:
            raise PowerCutError
        if died_after == 0 and isinstance(event, Inspected):
            raise PowerCutError

    with pytest.raises(PowerCutError):
        carried_out(database, run, machine, tell)
    assert stored(database, run)[0].status is RunStatus.RUNNING
    assert len(stored(database, run)[1]) == died_after

    heir = taken_over(database, run)
    machine.jobs.clear()
    finished, conclusion = carried_out(database, heir, machine)
    _, tried = stored(database, run)
    searched = [words(trial.knobs) for trial in tried if trial.source is not Source.CONFIRM]
    assert len(searched) == len(set(searched)) == 6
    assert [trial.number for trial in tried] == list(range(len(tried)))
    assert len(machine.jobs) == max(0, 6 - died_after) + PROCESSES
    assert len(tried) == max(6, died_after) + PROCESSES
    assert (finished.status, finished.attempt, words(conclusion.plan.knobs)) == (RunStatus.FINISHED, 2, GRAPH)


@pytest.mark.parametrize("confirmed", [1, PROCESSES])
def test_a_run_that_kills_every_worker_while_it_is_confirmed_is_given_up(database, machine, confirmed):
    """The next worker confirms from the beginning, so what was confirmed does not bring the run forward."""
    run = claimed(database, workload="zoo:mlp")
    now, attempts, heir = utcnow(), 0, run
    while heir is not None:
        attempts += 1
        assert attempts <= runs.MAX_DEATHS, "it is never given up"
        with pytest.raises(PowerCutError):
            carried_out(database, heir, machine, on_confirmed(confirmed, raising(PowerCutError())))
        now += timedelta(hours=1)
        with database.begin() as connection:
            heir = runs.claim(connection, "heir", device="cpu", now=now)
    found, tried = stored(database, run)
    assert (found.status, found.deaths, found.plan_id) == (RunStatus.FAILED, runs.MAX_DEATHS, None)
    assert len(tried) == 6 + runs.MAX_DEATHS * confirmed


# Leases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [cancel, taken_over])
@pytest.mark.parametrize("at", [0, 3])
def test_who_lost_the_run_stops_and_writes_nothing_more(database, machine, how, at):
    run = claimed(database)
    after_loss: list[Run] = []

    def lose() -> None:
        how(database, run)
        after_loss.append(stored(database, run)[0])

    with pytest.raises(LeaseLostError, match=r"cancelled|took it over"):
        carried_out(database, run, machine, on_trial(at, lose))
    found, tried = stored(database, run)
    assert found == after_loss[0]
    assert len(tried) == at
    assert len(machine.jobs) == at + 1, "the trial that had begun was the last"


@pytest.mark.parametrize("how", [cancel, taken_over])
def test_who_lost_the_run_at_the_very_end_stores_no_plan(database, machine, how):
    run = claimed(database)
    with pytest.raises(LeaseLostError):
        carried_out(database, run, machine, on_confirmed(PROCESSES, lambda: how(database, run)))
    assert len(stored(database, run)[1]) == 6 + PROCESSES
    with database.read() as connection:
        assert connection.scalar(select(func.count()).select_from(tables.plans)) == 0


def test_heartbeats_extend_the_lease_while_a_trial_takes_long(database, machine):
    run = claimed(database)
    seen: list[Run] = [run]

    def take_long() -> None:
        """Until two heartbeats were there."""
        for _ in range(2):
            wait_until(lambda: stored(database, run)[0].heartbeat_at != seen[-1].heartbeat_at)
            seen.append(stored(database, run)[0])

    machine.answer = lambda number, _: take_long() if number == 1 else None
    finished, _ = carried_out(database, run, machine, lease_s=30)
    _, first, second = seen
    assert second.lease_until - second.heartbeat_at == timedelta(seconds=30)
    assert first.heartbeat_at < second.heartbeat_at < first.lease_until, "there was no moment without a lease"
    assert finished.status is RunStatus.FINISHED


@pytest.mark.parametrize("fails", [False, True])
def test_the_heart_stops_with_the_run(database, machine, fails):
    run = claimed(database)
    machine.answer = lambda *_: failure() if fails else None
    with pytest.raises(NoTrialError) if fails else nullcontext():
        carried_out(database, run, machine)
    assert "kitsune-heartbeat" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("how", [cancel, taken_over])
def test_a_heartbeat_learns_that_the_run_is_lost(database, machine, how, monkeypatch):
    """So a worker stops before its next trial begins, even where it has nothing to write."""
    run = claimed(database)
    learnt: list[str] = []
    beat = run_execution.Heartbeat._beat
    monkeypatch.setattr(run_execution.Heartbeat, "_beat", lambda self: (beat(self), learnt.append(self._lost)))

    def lose(number: int, _: Job) -> None:
        if number == 1:
            how(database, run)
            wait_until(lambda: bool(learnt))

    machine.answer = lose
    with pytest.raises(LeaseLostError, match=r"was cancelled|took it over"):
        carried_out(database, run, machine, lease_s=0.1)
    assert len(stored(database, run)[1]) == 1
    assert learnt[0] is not None


def test_a_heartbeat_that_the_database_refuses_is_tried_again(database, machine, monkeypatch, caplog):
    run = claimed(database)
    answers = iter([StoreBusyError("locked"), StoreBusyError("locked")])
    beaten: list[Run] = []
    heartbeat = runs.heartbeat

    def refused_twice(*given: object, **named: object) -> Run:
        for error in answers:
            raise error
        beaten.append(heartbeat(*given, **named))
        return beaten[-1]

    monkeypatch.setattr(runs, "heartbeat", refused_twice)
    machine.answer = lambda number, _: wait_until(lambda: bool(beaten)) if number == 1 else None
    with caplog.at_level(logging.WARNING, "kitsune"):
        finished, _ = carried_out(database, run, machine, lease_s=0.1)
    assert finished.status is RunStatus.FINISHED
    assert caplog.text.count("will try again: locked") == 1
    assert caplog.text.count("are stored again") == 1


# A database that fails in the middle ----------------------------------------------------------------------------------


def test_a_database_that_stays_locked(url, machine, caplog):
    with open_database(url, busy_timeout_s=1.0) as database:
        run = claimed(database)
        lock = locked(url)
        machine.answer = lambda number, _: lock.__enter__() if number == 2 else None
        try:
            with pytest.raises(StoreBusyError, match="locked by another process"):
                carried_out(database, run, machine)
        finally:
            lock.__exit__(None, None, None)
        assert len(machine.jobs) == 3
        assert f"how run {run.id} ended could not be stored" in caplog.text
        found, tried = stored(database, run)
        assert (found.status, len(tried)) == (RunStatus.RUNNING, 2), "after its lease another worker goes on"
        finished, _ = carried_out(database, taken_over(database, run), Machine(GRAPH_WINS, SMALL))
        assert finished.status is RunStatus.FINISHED


def test_a_disk_that_is_full_in_the_middle(tmp_path, machine):
    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        run = claimed(database)
        full = {"pages": 10_000}
        event.listen(database.engine, "begin", lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {full['pages']}"))

        def fill(number: int, _: Job) -> None:
            if number == 2:
                full["pages"] = 1  # no less than there are

        machine.answer = fill
        with pytest.raises(StoreFullError, match="no space left"):
            carried_out(database, run, machine)
        kept = len(stored(database, run)[1])
        assert 2 <= kept < 6
        assert len(machine.jobs) == kept + 1


def test_connections_that_break_during_a_trial(postgres: Postgres, machine):
    """As in a restart of the server, or behind a firewall that forgets silent connections."""
    url = postgres.create()
    ours = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    def break_off(number: int, _: Job) -> None:
        if number == 2:
            with open_database(url) as rival, rival.begin() as connection:
                assert connection.execute(text(f"SELECT pg_terminate_backend(pid) {ours}")).all()

    machine.answer = break_off
    with open_database(url) as database:
        run = claimed(database)
        finished, _ = carried_out(database, run, machine)
        assert finished.status is RunStatus.FINISHED, "the next write connects again"
        assert len(stored(database, run)[1]) == 6 + PROCESSES
