import json
import math
import sys
from itertools import count
from random import Random

import pytest

from benchmarks import checkups
from tests.unit.tuner.machine import ENVIRONMENT
from tests.unit.tuner.noise import iid
from tuner.records import Arm, Measurement
from tuner.statistics.block_statistics import order
from tuner.timing.checkup import PLANTED, STEP

ARMS = (STEP, *PLANTED)


class Process:
    """One that was started, and is told to measure or killed."""

    def __init__(self, device, seed):
        self.name, self.was = (device, seed), "waiting"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def kill(self):
        self.was = "killed"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Processes that differ by little, and measure at once what is planted; those that were started."""
    begun, planted = [], dict(zip(ARMS, (0.0, *PLANTED.values()), strict=True))

    def started(device, seed):
        begun.append(Process(device, seed))
        return begun[-1]

    def told(process):
        process.was = "told"
        blocks = iid(0.05)(Random(str(process.name)), order(10, len(ARMS), 0))
        arms = tuple(
            Arm(
                name=name,
                knobs={},
                step_ms=tuple(10 * (1 + planted[name]) * math.exp(value) for value in values),
                peak_bytes=0,
                first_step_s=0,
            )
            for name, values in zip(ARMS, blocks, strict=True)
        )
        return Measurement(arms=arms, steps_per_block=(1,) * len(arms), environment=ENVIRONMENT)

    monkeypatch.setattr(checkups, "started", started)
    monkeypatch.setattr(checkups, "told", told)
    return begun, planted


def call(monkeypatch, path, *words):
    monkeypatch.setattr(sys, "argv", ["checkups", "--out", str(path), *words])
    return checkups.main()


def kinds(path):
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_pieces_add_up_to_one_file_with_its_figures(monkeypatch, tmp_path, machine, capsys):
    path, (begun, _) = tmp_path / "checkups.jsonl", machine
    assert call(monkeypatch, path, "--confirmations", "3", "--device", "cuda:0", "--minutes", "-1") == 0
    assert kinds(path) == ["environment"], "no time, so none was begun"
    checkups.go_on(path, ["cuda:0", "cuda:1"], 2, math.inf)
    assert call(monkeypatch, path, "--confirmations", "4", "--device", "cuda:0", "--device", "cuda:1") == 0
    told = [*["confirmation"] * 2, "environment", *["confirmation"] * 2]
    assert kinds(path)[:6] == ["environment", *told], "each call has an environment"
    assert set(kinds(path)[6:]) == {"figure"}
    ran = [process.name for process in begun if process.was == "told"]
    assert len(ran) == len(set(ran)) == 4 * 5
    assert not [process for process in begun if process.was == "waiting"]
    figures = {line["case"]: line for line in map(json.loads, path.read_text().splitlines()[6:])}
    false = figures["nothing planted: a difference claimed"]
    assert (false["value"], false["n"], false["upper_bound_95"]) == (0, 4, 75)
    assert figures["1 % slower: found"]["value"] == 100
    assert figures["3 % slower: slower by"]["value"] == pytest.approx(3, abs=0.1)
    assert figures["nothing planted: prediction holds"]["n"] == 2, "a pair on each device"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call(monkeypatch, path, "--confirmations", "4")
    assert "is complete" in capsys.readouterr().err


def test_false_claims_and_slowdowns_that_are_missed_break_the_bounds(machine):
    _, planted = machine

    def broken(**changes):
        planted.update(changes)
        lines = list(checkups.confirmations("cpu", 3, math.inf, count()))
        return checkups.is_broken(checkups.figures(lines))

    assert not broken()
    assert broken(again=0.05)
    assert broken(**{"again": 0.0, "3 % slower": 0.0}) is False, "processes are alike, so 1 % decides"
    assert broken(**{"1 % slower": 0.0})
