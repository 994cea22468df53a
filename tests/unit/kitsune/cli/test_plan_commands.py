"""`kitsune plan` in this process: what a plan says of itself, and whether it fits this machine."""

import json

import pytest

from kitsune.cli import output
from kitsune.device.backend import environment, pick_device
from kitsune.plan import Evidence, Interval, Numerics, Plan


def interval(median: float) -> Interval:
    return Interval(median=median, low=median * 0.98, high=median * 1.02)


def evidence(**changes: object) -> Evidence:
    errors_found = dict.fromkeys(("loss_error", "gradient_error", "parameter_error"), 1e-4)
    allowed = dict.fromkeys(("loss_allowed", "gradient_allowed", "parameter_allowed"), 1e-2)
    given = {
        "run_id": "run-1",
        "verdict": "faster",
        "baseline": "compile=reduce-overhead",
        "baseline_step_ms": 2.31,
        "step_ms": 1.0,
        "speedup": interval(2.31),
        "eager_step_ms": 11.2,
        "speedup_over_eager": interval(11.2),
        "baseline_peak_bytes": 2 * 2**30,
        "peak_bytes": 2**30,
        "first_step_s": 20.4,
        "blocks": 30,
        "samples_sha256": "0" * 64,
        "numerics": Numerics(steps=3, **errors_found, **allowed),
    }
    return Evidence(**{**given, **changes})


def measured_plan(**changes: object) -> Plan:
    return Plan(knobs={"precision": "bf16"}, environment=environment(pick_device("cpu")), evidence=evidence(**changes))


@pytest.fixture
def plan_file(tmp_path):
    def save(plan: Plan) -> str:
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return save


def test_show_prints_the_plan_as_it_is_stored(call, plan_file):
    plan = measured_plan()
    code, out, err = call("plan", "show", plan_file(plan), "--json")
    assert (code, err) == (0, "")
    assert Plan.from_json(json.loads(out)) == plan


def test_show_says_in_words_what_was_found(call, plan_file):
    plan = measured_plan()
    _, out, _ = call("plan", "show", plan_file(plan))
    assert out.startswith(
        "2.31x faster than the best stock configuration (compile=reduce-overhead), 95 % interval 2.26-2.36; "
        "11.2x over eager.\n"
    )
    assert "autocast to bfloat16" in out
    assert "1 GiB at peak; best stock configuration 2 GiB" in out
    assert "earned back after 2,000 steps" in out
    assert plan.plan_id in out
    assert plan.environment.gpu in out


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan.by_hand(precision="bf16"), "Written by hand: nothing about it was measured."),
        (Plan(evidence=evidence(verdict="same", speedup=interval(1.0))), "No gain found: keep your baseline."),
        (
            Plan(knobs={"compile": "default"}, evidence=evidence(verdict="same", baseline="compile=default")),
            (
                "No gain found over the best stock configuration (compile=default): the plan is that configuration, "
                "11.2x faster than the step as given."
            ),
        ),
        (
            Plan(evidence=evidence(verdict="too_noisy", speedup=interval(1.0), note="baselines lie apart; be quiet")),
            "Too noisy to tell: baselines lie apart; be quiet. Until then the plan changes nothing.",
        ),
        (
            Plan(
                knobs={"compile": "default"},
                evidence=evidence(verdict="ambiguous", baseline="compile=default", note="one process cannot tell"),
            ),
            (
                "Undecided: one process cannot tell. "
                "Until then the plan is the best stock configuration (compile=default)."
            ),
        ),
        (
            Plan(knobs={"update": "foreach"}, evidence=evidence(baseline="eager", speedup=interval(1.25))),
            "1.25x faster than the best stock configuration (the step as given, eager), 95 % interval 1.23-1.27.",
        ),
        (
            Plan(
                knobs={"update": "foreach"},
                evidence=evidence(baseline="eager", speedup=interval(1.25), note="1 of 5 processes left out"),
            ),
            (
                "1.25x faster than the best stock configuration (the step as given, eager), 95 % interval 1.23-1.27. "
                "Note: 1 of 5 processes left out."
            ),
        ),
        (
            Plan(
                knobs={"recompute": "blocks"},
                evidence=evidence(
                    verdict="fits",
                    baseline="eager",
                    speedup=interval(0.8),
                    baseline_peak_bytes=10 * 2**30,
                    memory_limit_bytes=4 * 2**30,
                    note="no stock configuration that was tried fits into 4 GiB; as given it needs 10 GiB",
                ),
            ),
            (
                "It fits: 1 GiB at peak, 1.000 ms a step; no stock configuration that was tried fits into 4 GiB; as "
                "given it needs 10 GiB, and 11.20 ms."
            ),
        ),
    ],
)
def test_the_headline_fits_the_verdict(plan, sentence):
    assert output.headline(plan) == sentence


def test_a_plan_that_was_tampered_with_is_refused(call, plan_file, tmp_path):
    path = tmp_path / plan_file(measured_plan())
    path.write_text(path.read_text().replace("2.31", "9.31"))
    code, out, err = call("plan", "show", str(path), "--json")
    assert code == 4
    assert json.loads(out)["error"]["type"] == "PlanError"
    assert "altered" in err


def test_check_compares_with_this_machine(call, plan_file):
    here = environment(pick_device("cpu"))
    plans = {
        "exact": Plan(environment=here),
        "compatible": Plan(environment=here.model_copy(update={"torch": "2.9.0"})),
        "refused": Plan(environment=here.model_copy(update={"gpu": "another"})),
    }
    for match, plan in plans.items():
        code, out, _ = call("plan", "check", plan_file(plan), "--device", "cpu", "--json")
        found = json.loads(out)
        assert (code, found["match"]) == (3 if match == "refused" else 0, match)
        assert found["plan_id"] == plan.plan_id
        assert found["reason"] == plan.environment.match(here)[1]
    assert call("plan", "check", plan_file(plans["refused"]), "--device", "cpu")[1].startswith(
        "refused: tuned on another"
    )


def test_a_plan_by_hand_fits_everywhere(call, plan_file):
    code, out, _ = call("plan", "check", plan_file(Plan.by_hand(update="foreach")))
    assert code == 0
    assert out.startswith("compatible: written by hand")


def test_check_on_a_device_that_is_not_there(call, plan_file):
    code, out, _ = call("plan", "check", plan_file(measured_plan()), "--device", "toaster", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (3, "UnfitError")
