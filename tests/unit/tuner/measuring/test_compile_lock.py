"""The lock by which several processes compile the same code once."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kitsune.knobs import KNOBS
from tuner.measuring.compile_lock import code_of, sharing, turn_for
from tuner.records import Phase

KNOBS_A = {"precision": "bf16", "compile": "default"}
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


def test_choices_that_only_change_launches_have_the_same_code():
    same = [{}, {"update": "kitsune"}, {"capture": "step"}, {"prefetch": 2}]
    assert len({code_of(KNOBS_A | more, randomness=True) for more in same}) == 1
    others = [{}, {"precision": "fp16"}, {"layout": "channels_last"}, {"fusion": "kitsune"}, {"streams": 4}]
    assert len({code_of(KNOBS_A | more, randomness=True) for more in others}) == len(others)
    assert code_of(KNOBS_A, randomness=True) != code_of(KNOBS_A, randomness=False)
    assert code_of({"capture": "step", "precision": "bf16"}, randomness=True) is None, "nothing is compiled"
    assert {name for name, knob in KNOBS.items() if not knob.changes_code} >= {"update", "capture"}


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


def test_after_a_failed_compilation_the_next_process_compiles(tmp_path):
    with sharing(str(tmp_path), lambda: Phase.NUMERICS):
        with pytest.raises(ValueError, match="broke"), turn_for(KNOBS_A, randomness=True):
            raise ValueError("it broke")
        assert not list(tmp_path.glob("*.compiled"))
        with turn_for(KNOBS_A, randomness=True):
            pass
        assert len(list(tmp_path.glob("*.compiled"))) == 1


def test_without_a_folder_or_without_compiling_nobody_waits(tmp_path):
    with sharing(None, lambda: Phase.NUMERICS) as queued, turn_for(KNOBS_A, randomness=True):
        assert queued == {}
    with sharing(str(tmp_path), lambda: Phase.NUMERICS), turn_for({"precision": "bf16"}, randomness=True):
        assert list(tmp_path.iterdir()) == []
