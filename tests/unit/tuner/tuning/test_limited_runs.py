"""Runs with a memory limit: the fastest step that fits, over the fastest one of plain torch that fits."""

from dataclasses import dataclass

import pytest

from kitsune.errors import BaselineError, NoTrialError
from tests.unit.tuner.machine import Machine, a_run, only, run_out, until_it_raises
from tuner.records import Arm, Failure, FailureKind, Phase, Source, Verdict
from tuner.search.space import Configuration
from tuner.statistics.plan_evidence import EAGER, STOCK

#: What a step keeps with each choice, as a part of what it needs as given.
PARTS = {"off": 1.0, "keep-75": 0.9, "keep-50": 0.8, "blocks": 0.4}
RECOMPUTING = [f"recompute={choice}" for choice in PARTS]
CHOICES = only("precision=bf16", "compile=default", "update=fused", "capture=step", *RECOMPUTING)


def peak_of(knobs: Configuration) -> int:
    half = 0.7 if "precision" in knobs else 1.0
    return round(1000 * half * PARTS[str(knobs.get("recompute", "off"))])


def ms_of(knobs: Configuration) -> float:
    """Graphs and products in bf16 are faster, what is recomputed slower."""
    slower = {"off": 1.0, "keep-75": 1.05, "keep-50": 1.15, "blocks": 1.3}[str(knobs.get("recompute", "off"))]
    return 10 * slower * (0.6 if "precision" in knobs else 1) * (0.8 if "capture" in knobs else 1)


class Times(dict[str, float]):
    """By configuration in words."""

    def get(self, name: str, default: float | None = None) -> float:
        knobs = dict(each.split("=") for each in name.split(", ")) if "=" in name else {}
        return ms_of(knobs)


@dataclass
class SmallMachine(Machine):
    """Its children refuse a candidate that needs more than the limit, as real ones do."""

    def measure(self, job, limits):
        found = super().measure(job, limits)
        peak_bytes = peak_of(job.arms[-1].knobs)
        if isinstance(found, Failure) or job.memory_limit_bytes is None or peak_bytes <= job.memory_limit_bytes:
            return found
        return Failure(kind=FailureKind.TOO_LARGE, phase=Phase.NUMERICS, reason="too large", peak_bytes=peak_bytes)

    def _arm(self, job, number, index) -> Arm:
        return super()._arm(job, number, index).model_copy(update={"peak_bytes": peak_of(job.arms[index].knobs)})


@dataclass
class TooSmallMachine(SmallMachine):
    """The step as given runs out of memory on it, whose size is that of 650 bytes."""

    def inspect(self, job):
        found = super().inspect(job)
        if not job.checkpointed:
            return Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.BUILD, reason="CUDA out of memory")
        environment = found.environment.model_copy(update={"memory_bytes": 650})
        return found.model_copy(update={"checkpointed": True, "environment": environment})

    def measure(self, job, limits):
        if not job.arms[-1].knobs:
            return Failure(kind=FailureKind.TOO_LARGE, phase=Phase.BUILD, reason="the step as given does not fit")
        return super().measure(job, limits)


def machine(**changes) -> SmallMachine:
    return SmallMachine(**{"step_ms": Times(), "inapplicable": CHOICES, **changes})


def limited(limit_bytes: int | None, trials: int = 14, **changes):
    return run_out(machine(**changes), a_run(budget_trials=trials, memory_limit_bytes=limit_bytes))


@pytest.mark.parametrize("limit_bytes", [950, 650, 600, 300])
def test_the_plan_fits_and_so_does_what_it_is_compared_with(limit_bytes):
    trials, conclusion = limited(limit_bytes)
    evidence = conclusion.plan.evidence
    assert peak_of(conclusion.plan.knobs) == evidence.peak_bytes <= limit_bytes
    assert evidence.baseline_peak_bytes <= limit_bytes
    assert evidence.memory_limit_bytes == limit_bytes
    assert conclusion.verdict is Verdict.FASTER
    assert "capture" in conclusion.plan.knobs
    assert trials[0].source is Source.BASELINE
    assert trials[0].failure.kind is FailureKind.TOO_LARGE
    fit = [each for each in trials if each.failure is None and each.source.is_search]
    fastest = min(ms_of(each.knobs) for each in fit)
    assert ms_of(conclusion.plan.knobs) == fastest


def test_what_the_step_as_given_needs_changes_nothing_else():
    _, free = limited(None)
    _, wide = limited(1000)
    assert wide.plan.knobs == free.plan.knobs
    assert wide.verdict is free.verdict is Verdict.FASTER
    assert "recompute" not in wide.plan.knobs


def test_where_nothing_of_plain_torch_fits_the_plan_is_what_fits():
    """Here recomputing works in a captured step only."""
    beside = {f"recompute={choice}, capture=none": "not here" for choice in PARTS if choice != "off"}
    trials, conclusion = limited(500, inapplicable={**CHOICES, **beside})
    assert conclusion.verdict is Verdict.FITS
    plan = conclusion.plan
    assert plan.knobs["recompute"] == "blocks"
    assert plan.evidence.verdict == "fits"
    assert plan.evidence.baseline == EAGER
    assert plan.evidence.baseline_peak_bytes == 1000 > 500 >= plan.evidence.peak_bytes
    assert "no stock configuration that was tried fits" in plan.evidence.note
    confirmed = [trial.measurement for trial in trials if trial.source is Source.CONFIRM]
    assert not any(arm.name == STOCK for each in confirmed for arm in each.arms)


def test_where_nothing_fits_there_is_no_plan_and_the_reason():
    asked = a_run(budget_trials=14, memory_limit_bytes=10)
    why = r"of \d+ configurations that were measured none fits; the first: too large; more time or trials"
    trials = until_it_raises(machine(), asked, NoTrialError, why)
    assert {trial.failure.kind for trial in trials} == {FailureKind.TOO_LARGE}
    assert any({"recompute": "blocks", "capture": "step"}.items() <= trial.knobs.items() for trial in trials)


def test_every_job_of_a_limited_run_has_its_limit():
    small = machine()
    run_out(small, a_run(budget_trials=8, memory_limit_bytes=700))
    assert {job.memory_limit_bytes for job in small.jobs} == {700}


def test_a_step_that_runs_out_of_memory_as_given_is_a_normal_start():
    small = TooSmallMachine(step_ms=Times(), inapplicable=CHOICES)
    trials, conclusion = run_out(small, a_run(budget_trials=14))
    assert [job.checkpointed for job in small.inspected] == [False, True]
    assert all(job.checkpointed and job.memory_limit_bytes == 650 for job in small.jobs)
    assert trials[0].failure.kind is FailureKind.TOO_LARGE
    plan = conclusion.plan
    assert conclusion.verdict is Verdict.FASTER
    assert "capture" in plan.knobs
    assert plan.evidence.peak_bytes <= plan.evidence.memory_limit_bytes == 650
    assert plan.evidence.baseline != EAGER
    assert "it was timed with its blocks as checkpoints" in plan.evidence.note


def test_of_two_limits_that_of_the_user_counts():
    small = TooSmallMachine(step_ms=Times(), inapplicable=CHOICES)
    _, conclusion = run_out(small, a_run(budget_trials=14, memory_limit_bytes=300))
    assert conclusion.plan.evidence.memory_limit_bytes == 300
    assert {job.memory_limit_bytes for job in small.jobs} == {300}


def test_a_step_that_runs_out_of_memory_with_checkpoints_too_fails_as_given():
    small = machine(as_given=Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.BUILD, reason="CUDA out of memory"))
    until_it_raises(small, a_run(budget_trials=3), BaselineError, "fails as given: CUDA out of memory")
    assert [job.checkpointed for job in small.inspected] == [False, True]


def test_a_step_that_fails_otherwise_is_looked_at_once():
    small = machine(as_given=Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="it broke"))
    until_it_raises(small, a_run(budget_trials=3), BaselineError, "fails as given: it broke")
    assert len(small.inspected) == 1
