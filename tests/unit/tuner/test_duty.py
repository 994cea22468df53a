"""`kitsune worker` in this process, with an empty queue and with signals."""

import os
import signal

import pytest

from kitsune import cli
from kitsune.exits import ExitCode
from tuner.duty import CODES, ENDS, Signals
from tuner.worker import How


def test_once_waits_for_no_run(capsys, kitsune_home):
    assert cli.run(["worker", "--once", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("worker ") and " on cpu: " in first
    assert second == "The queue holds no run for this device."
    assert (kitsune_home / "kitsune.db").exists()


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
    assert cli.run(["worker", *words]) == code
    assert message in capsys.readouterr().err


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
    with Signals().heard() as signals:
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
        with Signals().heard() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.stop.is_asked
    finally:
        signal.signal(signal.SIGHUP, before)
