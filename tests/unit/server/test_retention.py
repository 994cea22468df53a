"""Retention: old runs are deleted at the start of the server and every hour until it stops."""

import logging
import time

import pytest

from kitsune.errors import StoreBusyError
from server import retention
from tests.store.carrying import wait_until
from tests.store.samples import a_run
from tuner.records import RunStatus
from tuner.store.queries import runs
from tuner.wall_clock import utcnow
from tuner.worker import purge


def add_old(database, days: float) -> str:
    """A run that ended `days` ago."""
    end = utcnow() - retention.timedelta(days=days)
    with database.begin() as connection:
        return runs.add(connection, a_run(status=RunStatus.FAILED, created_at=end, finished_at=end)).id


def ids(database) -> set[str]:
    with database.read() as connection:
        return {run.id for run in runs.page(connection).runs}


def fail_once(monkeypatch, error: Exception) -> None:
    """The first attempt raises the error; the next follows at once."""
    errors = [error]

    def clear(*given, **options):
        if errors:
            raise errors.pop()
        return purge.clear(*given, **options)

    monkeypatch.setattr(retention, "EVERY_S", 0.01)
    monkeypatch.setattr(retention, "clear", clear)


def test_what_is_too_old_goes_at_the_start_and_every_hour(database, monkeypatch, caplog):
    monkeypatch.setattr(retention, "EVERY_S", 0.05)
    _, new = add_old(database, 31), add_old(database, 29)
    with caplog.at_level(logging.INFO, "kitsune.server"), retention.deleting_old_runs(database, 30):
        wait_until(lambda: ids(database) == {new})
        wait_until(lambda: "1 deleted" in caplog.text)
        add_old(database, 40)
        wait_until(lambda: ids(database) == {new})
    assert "runs that ended more than 30 days ago: 1 deleted" in caplog.text


def test_without_a_number_of_days_everything_stays(database):
    old = add_old(database, 10_000)
    with retention.deleting_old_runs(database, None):
        time.sleep(0.05)
    assert ids(database) == {old}


def test_a_database_that_is_busy_is_asked_again(database, monkeypatch, caplog):
    fail_once(monkeypatch, StoreBusyError("it is locked"))
    add_old(database, 2)
    with caplog.at_level(logging.WARNING, "kitsune.server"), retention.deleting_old_runs(database, 1):
        wait_until(lambda: ids(database) == set())
    assert "will try again: it is locked" in caplog.text


def test_what_nobody_foresaw_is_logged_and_does_not_end_it(database, monkeypatch, caplog):
    fail_once(monkeypatch, OverflowError("date value out of range"))
    add_old(database, 2)
    with caplog.at_level(logging.ERROR, "kitsune.server"), retention.deleting_old_runs(database, 1):
        wait_until(lambda: ids(database) == set())
    assert "will try again" in caplog.text
    assert "OverflowError: date value out of range" in caplog.text


@pytest.mark.timeout(50)
def test_a_server_that_ends_does_not_wait_for_it(database, monkeypatch):
    monkeypatch.setattr(purge, "RUNS_AT_ONCE", 1)
    monkeypatch.setattr(purge, "PAUSE_S", 60.0)
    for _ in range(3):
        add_old(database, 2)
    with retention.deleting_old_runs(database, 1):
        wait_until(lambda: len(ids(database)) == 2)
    assert len(ids(database)) == 2
