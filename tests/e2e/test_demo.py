"""The demo as a user runs it, and the two comparisons that it ends with."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kitsune
from tuner.store.engine import open_database
from tuner.store.queries import runs

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def run_demo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, DEMO, *arguments], env=environment, capture_output=True, text=True, timeout=380, check=False
    )


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_the_demo_tunes_keeps_the_run_and_trains_both_ways(kitsune_home):
    done = run_demo("--trials", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("trial 1 of 1: eager", "measured afresh: eager", "Verdict: same", "the same within the tolerance"):
        assert part in done.stdout
    assert done.stderr == ""
    with open_database(f"sqlite:///{kitsune_home}/kitsune.db") as database, database.read() as connection:
        (run,) = runs.page(connection).runs
    assert f"run {run.id}, plan {run.plan_id[:16]}" in done.stdout


def test_what_makes_no_sense_ends_with_one_line():
    done = run_demo("--budget", "soon")
    assert done.returncode == 1
    assert done.stderr.startswith("The demo stopped: budget is 'soon'")
    assert len(done.stderr.splitlines()) == 1


HALF = {"precision": "bf16", "layout": "channels_last", "update": "foreach"}


@pytest.mark.parametrize("knobs", [{}, pytest.param(HALF, marks=pytest.mark.minutes)])
def test_training_by_a_plan_ends_where_plain_training_ends(demo, knobs, capsys):
    assert demo.compare_training(kitsune.Plan.by_hand(**knobs), "cpu")
    assert "the same within the tolerance" in capsys.readouterr().out


def test_training_that_ends_elsewhere_is_told(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "train", lambda steps, plan, device: [2.3] * 40 + [0.5 if plan is None else 0.7] * 10)
    assert not demo.compare_training(kitsune.Plan.by_hand(), "cpu")
    assert "NOT the same" in capsys.readouterr().out


def test_both_ways_are_timed(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "ROUNDS", 2)
    monkeypatch.setattr(demo, "BLOCK_S", 0.0)
    monkeypatch.setattr(demo, "WARM_STEPS", 2)
    demo.compare_speed(kitsune.Plan.by_hand(update="foreach"), "cpu")
    told = capsys.readouterr().out
    assert [line.split("  ")[1] for line in told.splitlines()[2:4]] == ["plain", "by the plan"]
