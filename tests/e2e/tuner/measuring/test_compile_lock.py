"""The lock by which several processes compile the same code once, between processes."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Says when it compiles and when it has, and takes a second for it.
CHILD = """
import sys, time
from tuner.measuring.compile_lock import sharing, turn_for
from tuner.records import Phase
with sharing(sys.argv[1], lambda: Phase.NUMERICS) as queued:
    with turn_for({"compile": sys.argv[2]}, randomness=True):
        print("begins", flush=True)
        time.sleep(float(sys.argv[3]))
    print(sum(queued.values()), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with contextlib.ExitStack() as stack:

        def start(choice: str = "default", lasts_s: float = 1.0) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", CHILD, str(tmp_path), choice, str(lasts_s)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield start


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.minutes
def test_the_others_wait_for_the_one_that_compiles(tmp_path, child):
    first = child(lasts_s=6)
    assert line_of(first) == "begins"
    same = child(lasts_s=0)
    assert line_of(same) == "begins"
    assert len(list(tmp_path.glob("*.compiled"))) == 1, "the first has ended before"
    assert float(line_of(first)) < 0.5 < float(line_of(same)) < 6
    assert [process.wait(30) for process in (first, same)] == [0, 0]


def test_other_codes_do_not_wait_and_a_killed_compilation_is_redone_by_the_next(tmp_path, child):
    slow = child("default", lasts_s=60)
    assert line_of(slow) == "begins"
    other = child("reduce-overhead", lasts_s=0)
    assert (line_of(other), float(line_of(other)) < 0.5) == ("begins", True)
    same = child("default", lasts_s=0)
    slow.kill()
    slow.wait()
    assert line_of(same) == "begins"
    assert same.wait(30) == 0
