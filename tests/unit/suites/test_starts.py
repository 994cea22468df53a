"""How long the first steps of fresh processes take: the arms, what a process tells, and the figures."""

import pytest
from torch._dynamo.utils import counters

from benchmarks import starts
from benchmarks.starts import arms_of, figures, in_a_process, started
from kitsune.plan import Plan
from tests.unit.tuner.machine import ENVIRONMENT
from tuner.measuring.protocol import Inspection


def a_line(arm, *calls_s):
    return {"arm": arm, "calls_s": calls_s}


def test_the_first_process_of_an_arm_is_the_cold_one():
    lines = [a_line("stock", 30.0, 2.0), a_line("stock", 3.0, 1.0), a_line("stock", 5.0, 1.0), a_line("plan", 9.0)]
    assert {case: (value, n) for case, value, _, n in figures("mlp/64", lines)} == {
        "mlp/64, stock: first steps, cold": (32.0, 1),
        "mlp/64, stock: first steps, warm": (5.0, 2),
        "mlp/64, plan: first steps, cold": (9.0, 1),
    }


def test_beside_the_strongest_of_plain_torch_stands_the_plan_or_the_best_guess(monkeypatch, tmp_path):
    found = Inspection(
        environment=ENVIRONMENT, fingerprint="f", inapplicable={}, random=False, step_ms=1.0, peak_bytes=1, parameters=1
    )
    monkeypatch.setattr(starts, "inspected", lambda *_: found)
    guessed = arms_of("zoo:mlp", "cuda", None)
    assert guessed["stock"]["compile"] == "reduce-overhead"
    assert guessed["best_guess"]["fusion"] == "kitsune"
    plan = tmp_path / "plan.json"
    Plan.by_hand(precision="bf16").save(plan)
    assert arms_of("zoo:mlp", "cuda", plan) == {"stock": guessed["stock"], "plan": {"precision": "bf16"}}


def test_what_is_not_compiled_finds_nothing():
    counters.clear()
    told = started("zoo:mlp", "cpu", {})
    assert all(call_s > 0 for call_s in told["calls_s"])
    assert told["build_s"] > 0
    assert (told["traced_found"], told["traced_anew"], told["graphs_compiled"]) == (0, 0, 0)


@pytest.mark.minutes
def test_a_second_process_finds_all_that_the_first_has_compiled(tmp_path):
    cold, warm = (in_a_process("zoo:lenet5", "cpu", {"compile": "default"}, tmp_path) for _ in range(2))
    assert cold["graphs_compiled"] == 2, "forward and backward"
    assert (warm["traced_found"], warm["traced_anew"], warm["graphs_compiled"]) == (1, 0, 0)
    assert sum(warm["calls_s"]) < sum(cold["calls_s"]) < cold["whole_s"]


@pytest.mark.minutes
def test_a_process_that_fails_ends_the_suite(tmp_path):
    with pytest.raises(SystemExit, match="zoo:nothing"):
        in_a_process("zoo:nothing", "cpu", {}, tmp_path)
