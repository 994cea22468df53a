"""Fault injection: syntax, when faults occur, and the effect of those around a child."""

import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitsune.cli import main
from kitsune.errors import SettingsError
from tuner import fault_injection
from tuner.fault_injection import Fault, parsed
from tuner.measuring.child_process import supervise
from tuner.measuring.measure import checked
from tuner.measuring.protocol import Job, Limits, Message
from tuner.records import Failure, FailureKind, Phase

JOB = Job(kind="inspect", workload="zoo:mlp", device="cpu")
ANSWER = Message(failure=Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="as it says")).line()
PHASE = Message(phase=Phase.NUMERICS).line()


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    yield
    fault_injection.plant(())


def plant(text: str) -> None:
    fault_injection.plant(parsed(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" , ", ()),
        ("scratch-full", (Fault(name="scratch-full"),)),
        ("child-kill=timing@3", (Fault(name="child-kill", value="timing", first=3),)),
        ("database-full@5+, gpu-sick", (Fault(name="database-full", first=5, is_lasting=True), Fault(name="gpu-sick"))),
        ("clock-ahead=-3600", (Fault(name="clock-ahead", value="-3600", is_lasting=True),)),
    ],
)
def test_valid_faults_are_parsed(text, expected):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    "text", ["disk-on-fire", "scratch-full@0", "scratch-full=3", "clock-ahead", "clock-ahead=soon", "child-kill", "@2"]
)
def test_invalid_faults_are_refused_with_advice(text):
    with pytest.raises(SettingsError, match="KITSUNE_FAULTS holds"):
        parsed(text)


def test_a_command_says_so(capsys, monkeypatch):
    monkeypatch.setenv("KITSUNE_FAULTS", "disk-on-fire")
    assert main.run(["worker", "--once", "--device", "cpu"]) == 2
    assert "a fault is NAME" in capsys.readouterr().err


def test_a_fault_occurs_at_the_nth_call_and_is_logged(caplog):
    plant("gpu-sick@2, heart-stop@2+")
    assert [bool(fault_injection.struck("gpu-sick")) for _ in range(4)] == [False, True, False, False]
    assert [bool(fault_injection.struck("heart-stop")) for _ in range(4)] == [False, True, True, True]
    assert not fault_injection.struck("database-full")
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "planted fault gpu-sick strikes, at the 2. time"
    fault_injection.plant(())
    assert not fault_injection.struck("heart-stop")


def run(script: str = f"os.write(out, {ANSWER!r})") -> Failure:
    command = (sys.executable, "-c", f"import os, sys, time; out = int(sys.argv[1]); {script}")
    outcome = supervise(JOB, Limits(build_s=50, numerics_s=1), command)
    assert isinstance(outcome, Failure)
    return outcome


@pytest.mark.parametrize("name", ["scratch-full", "cache-full"])
def test_a_full_disk_is_a_failure_with_the_reason_and_the_next_child_starts(name, caplog):
    plant(name)
    failure = run()
    assert f"planted fault {name} strikes" in caplog.text
    assert (failure.kind, failure.phase) == (FailureKind.CRASHED, Phase.START)
    assert "No space left on device" in failure.reason
    assert "TMPDIR" in failure.reason
    assert run().reason == "as it says"


def test_a_disk_error_other_than_no_space_is_raised(monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(PermissionError):
        run()


def test_a_disk_on_which_python_finds_no_folder_is_full(monkeypatch):
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    assert "No usable temporary directory" in run().reason


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [("child-kill", FailureKind.CRASHED, "SIGKILL"), ("child-stop", FailureKind.TIMEOUT, "1 s")],
)
def test_a_child_that_is_killed_or_hangs_in_a_phase_is_a_failure(name, kind, words, caplog):
    plant(f"{name}=numerics")
    failure = run(f"os.write(out, {PHASE!r}); time.sleep(30)")
    assert f"planted fault {name}=numerics strikes" in caplog.text
    assert (failure.kind, failure.phase) == (kind, Phase.NUMERICS)
    assert words in failure.reason


def test_a_sticky_error_is_the_answer_of_a_child(caplog):
    plant("gpu-lost@2")
    answers = [checked(JOB, run()) for _ in range(3)]
    assert [answer.reason for answer in answers] == [
        "as it says",
        "CUDA error: device-side assert triggered",
        "as it says",
    ]
    assert "planted fault gpu-lost strikes" in caplog.text


def test_each_is_told_of_on_the_page():
    page = Path("docs/reliability.md").read_text()
    assert [name for name in fault_injection.KINDS if f"| `{name}" not in page] == []
