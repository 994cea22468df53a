"""Several processes that need the same compiled."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kitsune.knobs import KNOBS
from tuner import compiling
from tuner.compiling import FIRST, Compilations, code_of, sharing, turn_for
from tuner.records import Phase

KNOBS_A = {"precision": "bf16", "compile": "default"}
#: Says when it compiles and when it has, and takes a second for it.
CHILD = """
import sys, time
from tuner.compiling import sharing, turn_for
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


def test_what_only_launches_kernels_otherwise_has_the_same_code():
    same = [{}, {"update": "kitsune"}, {"capture": "step"}, {"prefetch": 2}]
    assert len({code_of(KNOBS_A | more, randomness=True) for more in same}) == 1
    others = [{}, {"precision": "fp16"}, {"layout": "channels_last"}, {"fusion": "kitsune"}, {"streams": 4}]
    assert len({code_of(KNOBS_A | more, randomness=True) for more in others}) == len(others)
    assert code_of(KNOBS_A, randomness=True) != code_of(KNOBS_A, randomness=False)
    assert code_of({"capture": "step", "precision": "bf16"}, randomness=True) is None, "nothing is compiled"
    assert {name for name, knob in KNOBS.items() if not knob.changes_code} >= {"update", "capture"}


def test_the_first_compilation_is_alone_and_the_others_wait_for_it(tmp_path, child):
    first = child(lasts_s=6)
    assert line_of(first) == "begins"
    same, other = child(lasts_s=0), child("reduce-overhead", lasts_s=0)
    assert [line_of(process) for process in (same, other)] == ["begins", "begins"]
    assert len(list(tmp_path.glob("*.compiled"))) >= 2, "the first has ended before"
    assert float(line_of(first)) < 0.5
    assert all(0.5 < float(line_of(process)) < 6 for process in (same, other))
    assert all(process.wait(30) == 0 for process in (first, same, other))
    assert len(list(tmp_path.glob("*.compiled"))) == 3, "the first, and two codes"


def test_others_do_not_wait_for_each_other_and_the_next_does_what_a_killed_one_has_begun(tmp_path, child):
    (tmp_path / f"{FIRST}.compiled").touch()
    slow = child("default", lasts_s=60)
    assert line_of(slow) == "begins"
    other = child("reduce-overhead", lasts_s=0)
    assert (line_of(other), float(line_of(other)) < 0.5) == ("begins", True)
    same = child("default", lasts_s=0)
    slow.kill()
    slow.wait()
    assert line_of(same) == "begins"
    assert same.wait(30) == 0


def test_a_turn_that_fails_is_left_to_the_next_one(tmp_path):
    with sharing(str(tmp_path), lambda: Phase.NUMERICS):
        with pytest.raises(ValueError, match="broke"), turn_for(KNOBS_A, randomness=True):
            raise ValueError("it broke")
        assert not list(tmp_path.glob("*.compiled"))
        with turn_for(KNOBS_A, randomness=True):
            pass
        assert len(list(tmp_path.glob("*.compiled"))) == 2


def test_the_first_does_not_keep_others_for_ever(tmp_path, child, monkeypatch):
    monkeypatch.setattr(compiling, "FIRST_S", 0.2)
    holder = child(lasts_s=30)
    assert line_of(holder) == "begins"
    here = Compilations(tmp_path, lambda: Phase.WARMUP)
    begin = time.monotonic()
    with here.turn("another code"):
        assert 0.2 <= time.monotonic() - begin < 5
    assert 0.2 <= here.queued_s[Phase.WARMUP] < 5
    assert not (tmp_path / f"{FIRST}.compiled").exists(), "that is for the one to say that has the lock"


def test_without_a_folder_or_without_compiling_nobody_waits(tmp_path):
    with sharing(None, lambda: Phase.NUMERICS) as queued, turn_for(KNOBS_A, randomness=True):
        assert queued == {}
    with sharing(str(tmp_path), lambda: Phase.NUMERICS), turn_for({"precision": "bf16"}, randomness=True):
        assert list(tmp_path.iterdir()) == []
