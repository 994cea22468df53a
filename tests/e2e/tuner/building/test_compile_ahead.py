"""The second process that compiles while the numerics gate runs, with a script in its place."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes import is_gone
from tests.unit.tuner.building.test_compile_ahead import a_job
from tuner.building import compile_ahead
from tuner.building.compile_ahead import compiled_ahead
from tuner.measuring.compile_lock import sharing
from tuner.measuring.protocol import Job
from tuner.records import Phase

#: In place of the process: says who it is and what it was given, and takes its time.
STANDS_IN = """
import os, pathlib, sys, time
from tuner.measuring.protocol import Job
job = Job.model_validate_json(sys.stdin.buffer.readline())
folder = pathlib.Path(job.folder)
(folder / "new").write_text(f"{os.getpid()} {os.getpgid(0)} {job.workload}")
(folder / "new").rename(folder / "begun")
time.sleep(job.budget_s)
(folder / "ended").touch()
"""


@pytest.fixture(autouse=True)
def stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "START", STANDS_IN)


def begun(folder: Path) -> list[str]:
    """Its number, its group and its workload, as soon as it is there."""
    end = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    return (folder / "begun").read_text().split()


def fail_within(job: Job, folder: Path) -> None:
    with compiled_ahead(job):
        begun(folder)
        raise ValueError("declined")


def test_the_second_process_runs_beside_the_block_and_is_waited_for(tmp_path):
    with sharing(str(tmp_path), lambda: Phase.NUMERICS):
        with compiled_ahead(a_job(tmp_path)):
            process, group, workload = begun(tmp_path)
            assert not (tmp_path / "ended").exists()
            assert (int(group), workload) == (os.getpgid(0), "zoo:mlp"), "it stops and dies with this one"
        assert (tmp_path / "ended").exists()
    assert is_gone(int(process))


def test_the_second_process_is_killed_when_the_block_raises(tmp_path):
    with sharing(str(tmp_path), lambda: Phase.NUMERICS):
        with pytest.raises(ValueError, match="declined"):
            fail_within(a_job(tmp_path, lasts_s=600), tmp_path)
        assert is_gone(int(begun(tmp_path)[0]))


def test_a_second_process_that_dies_does_not_block(tmp_path):
    with sharing(str(tmp_path), lambda: Phase.NUMERICS), compiled_ahead(a_job(tmp_path, lasts_s=600)):
        os.kill(int(begun(tmp_path)[0]), signal.SIGKILL)
    assert not (tmp_path / "ended").exists()
