"""The pool of measuring processes, with scripts in their place: stopping others during timing, and clean-up."""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitsune.errors import StoppedError
from tests.processes import is_gone
from tuner.measuring.child_process import go_on
from tuner.measuring.crew import Children
from tuner.measuring.protocol import ArmSpec, Job, Limits, Message
from tuner.records import Failure, FailureKind, Phase

#: Counts ticks of 10 ms of its own life into a file named by its seed, says that it is ready, and is timed for 0.5 s.
SCRIPT = """
import json, os, sys, threading, time
out = int(sys.argv[1])
say = lambda text: os.write(out, text.encode())
job = json.loads(sys.stdin.readline())
folder, seed = {folder!r}, job["seed"]
ticks = open(os.path.join(folder, f"ticks-{{seed}}"), "w", buffering=1)
def tick():
    while True:
        print(time.monotonic(), file=ticks)
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
{extra}
say(json.dumps({{"phase": "build"}}) + chr(10))
time.sleep(job["rounds"] / 100)
say(json.dumps({{"phase": "timing"}}) + chr(10))
assert sys.stdin.readline() == "go" + chr(10)
begin = time.monotonic()
time.sleep(0.5)
with open(os.path.join(folder, f"timed-{{seed}}"), "w") as file:
    json.dump([begin, time.monotonic()], file)
say({answer!r})
time.sleep(0.2)
"""
ANSWER = Message(failure=Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="as it says")).line().decode()
ARMS = (ArmSpec(name="a"), ArmSpec(name="b"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[type]:
    made: list[Children] = []

    def of(extra: str = "", spares: int = 0) -> Children:
        script = SCRIPT.format(folder=str(tmp_path), answer=ANSWER, extra=extra)
        made.append(Children("train.py:make", "cpu", spares, (sys.executable, "-c", script)))
        return made[-1]

    yield of
    for crew in made:
        crew.close()


def a_job(seed: int, build_s: float = 0.01) -> Job:
    return Job(workload="train.py:make", device="cpu", seed=seed, arms=ARMS, rounds=max(1, round(100 * build_s)))


def ticks(folder: Path, seed: int) -> list[float]:
    return [float(line) for line in (folder / f"ticks-{seed}").read_text().split()]


def timed(folder: Path, seed: int) -> tuple[float, float]:
    begin, end = json.loads((folder / f"timed-{seed}").read_text())
    return begin, end


def test_one_child_is_timed_at_a_time_and_the_others_are_stopped(make, tmp_path):
    with make() as crew:
        tickets = [crew.begin(a_job(seed), Limits()) for seed in range(3)]
        done = [crew.finished(go_on) for _ in tickets]
    assert sorted(each.ticket for each in done) == tickets
    assert not any(each.alone for each in done)
    spans = sorted(timed(tmp_path, seed) for seed in range(3))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    for seed in range(3):
        for other in range(3):
            begin, end = timed(tmp_path, other)
            within = [at for at in ticks(tmp_path, seed) if begin + 0.1 < at < end - 0.05]
            assert bool(within) is (seed == other), f"{seed} ran for {len(within)} ticks while {other} was timed"


def test_a_limit_does_not_run_out_while_others_are_timed(make):
    """Three are timed for 0.5 s each; what builds for 0.7 s beside them has a limit of 1.2 s."""
    with make() as crew:
        slow = crew.begin(a_job(9, build_s=0.7), Limits(build_s=1.2))
        for seed in range(3):
            crew.begin(a_job(seed), Limits())
        done = {finished.ticket: finished for finished in (crew.finished(go_on) for _ in range(4))}
    outcome = done[slow].outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.RAISED, outcome.reason
    assert done[slow].spent.total_s > 1.2


def test_spent_time_is_reported_by_phase(make):
    with make() as crew:
        crew.begin(a_job(1, build_s=0.3), Limits())
        finished = crew.finished(go_on)
    assert finished.alone
    assert 0.25 < finished.spent.build_s < 2
    assert 0.45 < finished.spent.timing_s < 3
    assert finished.spent.numerics_s == finished.spent.warmup_s == 0


def test_a_spare_is_ready_before_there_is_a_job(make, tmp_path):
    script = f"open(os.path.join({str(tmp_path)!r}, 'pid-' + str(os.getpid())), 'w').close()\n"
    with make(spares=1) as crew:
        command = crew.command[2]
        crew.command = (*crew.command[:2], command.replace("job = json", f"{script}job = json", 1))
        crew.begin(a_job(1), Limits())
        end = time.monotonic() + 20
        while not list(tmp_path.glob("pid-*")) and time.monotonic() < end:
            time.sleep(0.02)
        ready = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        assert len(ready) == 1, "the one that was started when the first got its job"
        crew.begin(a_job(2), Limits())
        for _ in range(2):
            crew.finished(go_on)
        assert is_gone(ready[0]), "it had the second job"
        assert (tmp_path / "timed-2").exists()


def test_a_stopped_child_is_killed_all_the_same(make, tmp_path):
    note = f"open(os.path.join({str(tmp_path)!r}, f'pid-{{seed}}'), 'w').write(str(os.getpid()))"
    with make(note) as crew:
        crew.begin(a_job(1), Limits())
        crew.begin(a_job(2, build_s=9), Limits())

        def check() -> None:
            if list(tmp_path.glob("ticks-*")) and crew._timed is not None:
                raise StoppedError("enough")

        with pytest.raises(StoppedError):
            crew.finished(check)
    texts = [path.read_text() for path in tmp_path.glob("pid-*")]
    pids = [int(text) for text in texts if text]  # one may have been killed before it wrote
    assert pids
    assert all(map(is_gone, pids))


def test_the_budget_ends_a_stopped_child_too(make):
    with make() as crew:
        crew.begin(a_job(1), Limits())
        late = crew.begin(a_job(2, build_s=9), Limits(total_s=0.3))
        done = {finished.ticket: finished for finished in (crew.finished(go_on) for _ in range(2))}
    outcome = done[late].outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.TIMEOUT


def test_nothing_is_left_behind(make):
    before = set(os.listdir("/proc/self/fd"))
    with make(spares=2) as crew:
        crew.begin(a_job(1), Limits())
        crew.finished(go_on)
    assert set(os.listdir("/proc/self/fd")) == before
