"""Planted faults of measuring processes and of the disk beneath them."""

import errno
import sys

import pytest

from tests.one_job import outcome_of
from tests.unit.tuner.test_fault_injection import nothing_planted, plant  # noqa: F401
from tuner.measuring.protocol import Job, Limits, Message
from tuner.records import Failure, FailureKind, Phase

JOB = Job(kind="inspect", workload="zoo:mlp", device="cpu")
ANSWER = Message(failure=Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="as it says")).line()
PHASE = Message(phase=Phase.NUMERICS).line()


def run(script: str = f"os.write(out, {ANSWER!r})") -> Failure:
    command = (sys.executable, "-c", f"import os, sys, time; out = int(sys.argv[1]); {script}")
    outcome = outcome_of(JOB, Limits(build_s=50, numerics_s=1), command)
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
    answers = [run() for _ in range(3)]
    assert [answer.reason for answer in answers] == [
        "as it says",
        "CUDA error: device-side assert triggered",
        "as it says",
    ]
    assert "planted fault gpu-lost strikes" in caplog.text
