"""Suite training_step: arms of ours are planned by a process before the one that measures."""

import pytest
import torch

from benchmarks import training_step
from kitsune import Plan
from kitsune.launches.execution import kernel_trace


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls the suite on a GPU that is only pretended: `race` stands for what would be measured."""
    plan, done = tmp_path / "plan.json", []
    Plan.by_hand(compile="default").save(plan)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(training_step.subprocess, "run", lambda words, check: done.append(words[3:]))
    monkeypatch.setattr(training_step, "prepare", lambda name, _: done.append(f"prepared {name}"))
    monkeypatch.setattr(training_step, "write", lambda suite, case, arms, note, out: done.append(note))

    def called(*words, race=lambda builds, _: done.append(f"raced {', '.join(builds)}")):
        monkeypatch.setattr(training_step, "race", race)
        monkeypatch.setattr("sys.argv", ["training_step", "--case", "mlp/64", "--plan", str(plan), *words])
        training_step.main()
        return done

    return called


def test_arms_of_ours_are_planned_first(call):
    ahead, raced, note = call("--arms", "compile", "kitsune", "graph", "kitsune_dropin")
    assert ahead[:2] == ["--case", "mlp/64"]
    assert ahead[4:] == ["--arms", "kitsune", "kitsune_dropin", "--only-prepare"]
    assert raced == "raced compile, kitsune, graph, kitsune_dropin"
    assert "profiler" not in note


def test_the_process_that_plans_measures_nothing(call):
    assert call("--arms", "kitsune", "--only-prepare") == ["prepared kitsune"]


def test_rivals_alone_need_none(call):
    assert call("--arms", "compile", "graph")[0] == "raced compile, graph"


def test_a_look_of_the_profiler_is_told(call, monkeypatch):
    monkeypatch.setattr(training_step, "profile", lambda **named: None)
    note = call("--arms", "graph", race=lambda *_: [kernel_trace.profile(use_cpu=False) for _ in range(3)])[-1]
    assert note.endswith("; torch.profiler looked 3 times")
