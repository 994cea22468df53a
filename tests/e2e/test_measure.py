"""Real measuring processes on the CPU, with workloads that behave and workloads that do not.

What they answer, whatever the process, has tests/unit/tuner/search/test_outcomes.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kitsune.class_tables import ClassTable
from tests import behaviours
from tests.one_job import outcome_of
from tests.processes import is_gone, measuring
from tuner.measuring.protocol import ArmSpec, Inspection, Job, Limits, Outcome
from tuner.records import Failure, FailureKind, Measurement, Phase


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(behaviours.__file__, tmp_path / "workloads.py"))


def job(workload: str, rounds: int = 3, **knobs: str) -> Job:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    return Job(workload=workload, device="cpu", arms=arms, rounds=rounds, block_ms=5)


def looked_at(workload: str) -> Job:
    return Job(kind="inspect", workload=workload, device="cpu")


def test_a_zoo_model_is_inspected():
    found = outcome_of(looked_at("zoo:mlp?size=tiny"))
    assert isinstance(found, Inspection), found
    assert not found.random
    assert found.parameters > 1000
    assert found.environment.device == "cpu"
    assert not found.fingerprint.startswith("local-")
    assert "precision=tf32" in found.inapplicable
    assert "precision=bf16" not in found.inapplicable


def test_the_launches_of_a_step_are_summed_up_by_class():
    arms = (ArmSpec(name="candidate", knobs={"precision": "bf16"}),)
    found = outcome_of(Job(kind="explain", workload="zoo:mlp?size=tiny", device="cpu", arms=arms))
    assert isinstance(found, ClassTable), found
    assert {"matrix products", "copies and casts", "optimizer"} <= {each.name for each in found.classes}


def test_a_step_against_itself():
    found = outcome_of(job("zoo:mlp?size=tiny", rounds=4))
    assert isinstance(found, Measurement), found
    baseline, candidate = found.arms
    assert [len(arm.step_ms) for arm in found.arms] == [4, 4]
    assert baseline.applied == candidate.applied == ()
    assert 1 / 3 < min(baseline.step_ms) / min(candidate.step_ms) < 3  # whatever else the machine did only adds
    assert found.numerics is not None
    assert 0 < found.numerics.gradient_error < 1e-5  # fp32 against float64: not equal, and near
    assert found.numerics.parameter_error < found.numerics.parameter_allowed


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        # tests/e2e/test_cli.py has one that raises, from the command line to the database
        pytest.param(
            "raises", FailureKind.RAISED, "ValueError: no such luck (workloads.py:", marks=pytest.mark.minutes
        ),
        ("breaks_down", FailureKind.CRASHED, "SIGSEGV"),
        # tests/e2e/tuner/measuring/test_child_process.py: what any child says and leaves behind
        pytest.param("leaves", FailureKind.CRASHED, "code 0 without a result", marks=pytest.mark.minutes),
        pytest.param("lies", FailureKind.CRASHED, "not a message", marks=pytest.mark.minutes),
    ],
)
def test_a_workload_that_fails_as_given(file, function, kind, words):
    found = outcome_of(looked_at(f"{file}:{function}"))
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (kind, Phase.BUILD)
    assert words in found.reason


def test_a_workload_that_prints_is_measured(file):
    found = outcome_of(job(f"{file}:chatters"))
    assert isinstance(found, Measurement), found


def test_a_workload_that_hangs_is_killed(file):
    seen: set[int] = set()
    found = outcome_of(looked_at(f"{file}:hangs"), Limits(build_s=1), check=lambda: seen.update(measuring()))
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (FailureKind.TIMEOUT, Phase.BUILD)
    assert len(seen) == 1
    assert all(map(is_gone, seen))


@pytest.mark.timeout(300)  # 20 s of compiling on two idle cores
@pytest.mark.minutes
def test_a_compiled_step_with_dropout_is_proven_and_measured(file):
    found = outcome_of(job(f"{file}:with_dropout", compile="default"))
    assert isinstance(found, Measurement), found
    assert found.arms[1].applied == ("compile=default",)
    assert found.numerics is not None
    assert found.numerics.gradient_error < 1e-5
    assert found.numerics.note == ""


def test_a_child_that_is_killed_from_outside(file):
    found: list[Outcome] = []
    slow = job("zoo:mlp?size=tiny", rounds=1000).model_copy(update={"block_ms": 500.0})
    thread = threading.Thread(target=lambda: found.append(outcome_of(slow)))
    thread.start()
    end = time.monotonic() + 120
    seen: set[int] = set()  # while it becomes another program, a process has no command line
    while not seen and time.monotonic() < end:
        seen |= measuring()
        time.sleep(0.05)
    (child,) = seen
    os.kill(child, signal.SIGKILL)
    thread.join(120)
    assert isinstance(found[0], Failure), found
    assert found[0].kind is FailureKind.CRASHED
    assert "SIGKILL" in found[0].reason
    assert is_gone(child)


def test_the_child_dies_with_its_parent(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a parent that is killed cannot clean up
    code = f"from tests.one_job import *; outcome_of(Job(kind='inspect', workload={f'{file}:hangs'!r}, device='cpu'))"
    note = Path(f"{file}.pid")
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(behaviours.__file__).parents[1]) as parent:
        end = time.monotonic() + 120
        while not (note.exists() and note.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        child = int(note.read_text())
        assert not is_gone(child, within_s=0.2)
        parent.kill()
    assert is_gone(child)
