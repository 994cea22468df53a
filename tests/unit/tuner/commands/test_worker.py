"""`kitsune worker` in this process, with an empty queue and with signals."""

import os
import signal
import threading
import time

import pytest

from kitsune.cli import main
from kitsune.cli.exit_codes import ExitCode
from kitsune.errors import SchemaError, StoreBusyError, StoreError
from tuner.commands import worker
from tuner.commands.worker import CODES, ENDS, Signals
from tuner.measuring.scratch import OWNER, PREFIX
from tuner.store.database import Database
from tuner.store.engine import open_database
from tuner.worker.run_execution import How


def test_once_waits_for_no_run(capsys, kitsune_home):
    assert main.run(["worker", "--once", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("worker ") and " on cpu: " in first
    assert first.endswith(f"; it serves sqlite:///{kitsune_home}/kitsune.db")
    assert second == "The queue holds no run for this device."
    assert (kitsune_home / "kitsune.db").exists()


def test_a_worker_sweeps_what_others_left(tmp_path, monkeypatch):
    stale = tmp_path / f"{PREFIX}1234"
    stale.mkdir()
    (stale / OWNER).touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main.run(["worker", "--once", "--device", "cpu"]) == 0
    assert not stale.exists()


@pytest.mark.parametrize(
    ("words", "variables", "code", "message"),
    [
        (["--lease", "1s"], {}, 2, "at least 2 s"),
        (["--lease", "soon"], {}, 2, "lease is 'soon'"),
        (["--device", "tpu"], {}, 3, "tpu"),
        ([], {"KITSUNE_DISABLE": "1"}, 3, "KITSUNE_DISABLE"),
        (["--database", "mysql://host/name"], {}, 11, "mysql"),
    ],
)
def test_what_makes_no_sense_is_told_at_once(words, variables, code, message, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main.run(["worker", *words]) == code
    assert message in capsys.readouterr().err


@pytest.fixture
def away(monkeypatch):
    """Databases that are away: the next ones to be opened raise these errors. Gives the addresses that were asked."""
    asked: list[str] = []

    def replace(*errors: StoreError) -> list[str]:
        left = list(errors)

        def opened(url: str) -> Database:
            asked.append(url)
            if left:
                raise left.pop(0)
            return open_database("sqlite://")

        monkeypatch.setattr(worker, "open_database", opened)
        monkeypatch.setattr(worker, "AWAY_S", (0.01, 0.02))
        return asked

    return replace


TEAM = "postgresql://me:secret@127.0.0.1:1/kitsune"
GONE = StoreError("the database cannot be reached")


def test_a_database_that_is_away_at_the_start_is_asked_again(away, capsys, monkeypatch):
    asked = away(GONE, StoreBusyError("the database has no connection left"))
    monkeypatch.setattr(worker.Worker, "work", lambda self: None)
    assert main.run(["worker", "--device", "cpu", "--database", TEAM]) == 0
    first, second, third = capsys.readouterr().err.splitlines()
    assert asked == [TEAM] * 3
    assert first == "The database cannot be opened, will try again: the database cannot be reached"
    assert "no connection left" in second
    assert third.startswith("worker ")


def test_a_worker_that_waits_for_its_database_can_be_ended(away, capsys, heard):
    asked = away(*[GONE] * 100_000)

    def end() -> None:
        while not asked:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    assert main.run(["worker", "--device", "cpu", "--database", TEAM]) == 0
    ending.join()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--once", "--database", TEAM], GONE),
        (["--database", TEAM], SchemaError("another version wrote it")),
        (["--database", "sqlite:///x"], StoreError("the database is damaged")),
    ],
)
def test_where_waiting_does_not_help_a_worker_does_not_wait(words, error, away, capsys):
    asked = away(error)
    assert main.run(["worker", "--device", "cpu", *words]) == 11
    assert len(asked) == 1
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_a_locked_file_is_waited_for(away, monkeypatch):
    asked = away(StoreBusyError("the database stayed locked"))
    monkeypatch.setattr(worker.Worker, "work", lambda self: None)
    assert main.run(["worker", "--device", "cpu", "--database", "sqlite:///x"]) == 0
    assert len(asked) == 2


def test_every_end_of_a_run_has_an_exit_code():
    assert set(ENDS) == set(How)
    assert {how for how, code in ENDS.items() if code is ExitCode.OK} == {How.FINISHED, How.RETURNED}


@pytest.fixture
def heard():
    """As in a shell's foreground: under nohup, the tests themselves inherit that a signal is ignored."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in CODES}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", CODES)
def test_the_first_signal_asks_and_the_second_ends(number, heard):
    before = {each: signal.getsignal(each) for each in CODES}
    with Signals().installed() as signals:
        assert not signals.stop.is_asked
        os.kill(os.getpid(), number)
        assert signals.stop.is_asked
        assert signals.first is number
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
    assert {each: signal.getsignal(each) for each in CODES} == before


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals().installed() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.stop.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)
