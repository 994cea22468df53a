"""The long numerics gate on a step with planted faults, in fp32, in bf16 and given in bf16; and its depth by budget."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from kitsune.long_proof import LongProof, Margin
from tests.unit.tuner import faulty_steps
from tuner.building.probe import Probe
from tuner.child.measure_job import measure_job
from tuner.measuring.crew import within
from tuner.measuring.protocol import ArmSpec, Job, Limits, misfit
from tuner.numerics import long_training
from tuner.numerics.depth import DEPTHS, LEAST_STEPS, depth_of
from tuner.numerics.long_gate import prove_job, prove_long
from tuner.records import Failure, FailureKind, Measurement, Phase

FAULTY = Path(faulty_steps.__file__)
PRECISIONS = {"fp32": {}, "bf16": {"precision": "bf16"}, "given bf16": {}}
#: By what each fault is found: alike in both precisions where the update tells, since it is recomputed in float64.
FOUND_BY = {
    "gradient_too_large": "gradient",
    "convolution_bias_gradient_of_other_memory": "gradient",
    "bias_gradient_zero": "gradient of hidden.bias",
    "weight_gradient_zero": "gradient",
    "weight_gradient_zero_now_and_then": "gradient",
    "bias_never_updated": "update of head.bias",
    "update_skipped_every_4th": "update of|state",
    "update_skipped_every_8th": "update of|state",
    "weight_decay_dropped": "update of",
    "weight_decay_times_10": "update of",
    "beta1": "update of|state exp_avg of",
    "beta2": "update of|state exp_avg_sq of",
    "eps": "update of",
    "rate_ignored": "update of",
    "momentum_of_batch_norm": "buffer norm",
    "loss_doubled": "loss|gradient",
    "loss_doubled_later": "loss|gradient",
    "nan_later": "the loss is nan at step 20",
    "constant_batch": "loss|gradient",
    "stale_statistics": "buffers|buffer norm",
    "dropout_off": "variance over seeds",
    "dropout_off_in_one": "variance over seeds|rate of the dropout drop1",
    "dropout_rarer": "variance over seeds|rate of the dropout drop1",
    "dropout_more_often": "variance over seeds|rate of the dropout drop1",
    "fresh_masks": "derivative along",
}


def proven(name: str, precision: str) -> LongProof | Failure:
    """At 50 steps, on every machine: how deep it looks follows from the times that are given here."""
    is_random = name in faulty_steps.DROPOUT_FAULTS or name == "right_with_dropout"
    probe = Probe(random=is_random, vary=True, step_ms=1.0, peak_bytes=0, parameters=1)
    knobs = {"layout": "channels_last", **PRECISIONS[precision]}
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    made = f"{name}_in_bf16" if precision == "given bf16" else name
    budget_s = 0.42 if is_random else 0.3
    return prove_long(Job(workload=f"{FAULTY}:{made}", device="cpu", arms=arms, budget_s=budget_s), probe)


def test_every_planted_fault_is_looked_for():
    assert set(FOUND_BY) == set(faulty_steps.FAULTS)


#: Of each kind one or two, the others take the time of as many: -m minutes.
USUALLY = {
    "fp32": (
        "gradient_too_large",
        "bias_gradient_zero",
        "update_skipped_every_8th",
        "weight_decay_dropped",
        "beta2",
        "rate_ignored",
        "momentum_of_batch_norm",
        "loss_doubled_later",
        "nan_later",
        "constant_batch",
        "stale_statistics",
        "dropout_off_in_one",
        "fresh_masks",
    ),
    "bf16": ("weight_gradient_zero_now_and_then", "loss_doubled", "dropout_rarer"),
    "given bf16": ("update_skipped_every_8th", "loss_doubled", "dropout_rarer"),
}


#: Less than what one rounding of a weight or a buffer to bf16 changes.
LOST_IN_BF16 = ("bias_never_updated", "weight_decay_dropped", "weight_decay_times_10", "eps", "momentum_of_batch_norm")


def faults_by_precision() -> list[object]:
    return [
        pytest.param(fault, precision, marks=[pytest.mark.minutes] * (fault not in USUALLY[precision]))
        for fault in FOUND_BY
        for precision in PRECISIONS
        if not (precision == "given bf16" and fault in LOST_IN_BF16)
    ]


@pytest.mark.parametrize(("fault", "precision"), faults_by_precision())
def test_a_planted_fault_is_refused(fault, precision):
    found = proven(fault, precision)
    assert isinstance(found, Failure)
    assert found.phase is Phase.NUMERICS
    assert found.kind is (FailureKind.NOT_FINITE if fault == "nan_later" else FailureKind.WRONG)
    assert any(words in found.reason for words in FOUND_BY[fault].split("|")), found.reason


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["right", "right_with_dropout"])
def test_a_right_candidate_passes_and_says_what_was_compared(name, precision):
    found = proven(name, precision)
    assert isinstance(found, LongProof), found
    assert (found.steps, found.restarts, found.updates) == (LEAST_STEPS, 8, 12)
    assert found.directions == (8 if name == "right_with_dropout" else 0)
    whats = {margin.what for margin in found.margins}
    assert {"update of", "loss", "gradients", "mean loss of steps"} <= whats
    if name == "right_with_dropout":
        assert {"rate of the dropout", "mean derivative along directions"} <= whats
    assert all(margin.is_kept for margin in found.margins)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of torch's compiler
def test_code_compiled_by_a_trial_is_reused_by_the_long_gate(tmp_path, monkeypatch):
    """A flag of torch's that is left otherwise by the first trial is another key of Inductor's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs={"compile": "default"}))
    job = Job(workload="zoo:mlp", device="cpu", arms=arms, rounds=2, block_ms=0.001, budget_s=2.0)
    looked = []
    for look in (measure_job, measure_job, prove_job):
        torch.compiler.reset()
        counters.clear()
        found = look(job, lambda phase: None)
        assert isinstance(found, (Measurement, LongProof)), found
        looked.append(counters["inductor"]["fxgraph_cache_miss"])
    assert looked[0] > 0
    assert looked[1:] == [0, 0]


def test_a_larger_budget_gives_a_greater_depth():
    depths = [depth_of(0.01, 0.03, budget_s, is_random=True)[0] for budget_s in (1, 5, 10, 20, 100, 1000)]
    assert [depth.steps for depth in depths] == sorted(depth.steps for depth in depths)
    assert depths[0] is DEPTHS[-1]
    assert depths[-1] is DEPTHS[0]


def test_a_note_says_when_fewer_than_50_steps_fit():
    depth, note = depth_of(1.0, 3.0, 10.0, is_random=False)
    assert depth.steps < LEAST_STEPS
    assert "50 steps would take about" in note
    assert depth_of(1.0, 3.0, 1e4, is_random=False)[1] == ""


def test_a_proof_with_exceeded_margins_is_refused():
    job = Job(kind="prove", workload="zoo:mlp", device="cpu", arms=(ArmSpec(name="candidate"),))
    kept, broken = (Margin(what="loss", error=error, allowed=1.0) for error in (0.5, 2.0))
    proof = LongProof(steps=50, restarts=8, updates=12, directions=0, margins=(kept,))
    assert misfit(job, proof) is None
    assert "errors beyond their limits" in str(misfit(job, proof.model_copy(update={"margins": (kept, broken)})))
    assert "asked to measure" in str(misfit(job.model_copy(update={"kind": "measure"}), proof))


def proven_by(end_s: float, monkeypatch: pytest.MonkeyPatch, name: str = "right_with_dropout") -> LongProof | Failure:
    """At 50 steps, by a clock that is one second on each time it is asked."""
    seconds = itertools.count()
    monkeypatch.setattr(long_training, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    probe = Probe(random=True, vary=True, step_ms=1.0, peak_bytes=0, parameters=1)
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs={"layout": "channels_last"}))
    job = Job(workload=f"{FAULTY}:{name}", device="cpu", arms=arms, budget_s=0.42)
    return prove_long(job, probe, end_s=end_s)


def test_what_a_proof_has_no_time_for_is_left_out_and_said(monkeypatch):
    found = proven_by(109.0, monkeypatch)
    assert isinstance(found, LongProof), found
    assert (found.steps, found.restarts) == (LEAST_STEPS, 8)
    assert found.directions == 0
    assert any(note.startswith("no time for the checks with random numbers") for note in found.notes)
    found = proven_by(79.0, monkeypatch)
    assert isinstance(found, LongProof), found
    assert 20 <= found.steps < LEAST_STEPS
    assert any(
        note.endswith(f"settled steps in place of {LEAST_STEPS}, and no update recomputed") for note in found.notes
    )
    assert "no time for yardstick trainings: losses were not compared" in found.notes


def test_a_proof_with_too_little_time_is_a_failure(monkeypatch):
    found = proven_by(20.0, monkeypatch)
    assert isinstance(found, Failure)
    assert (found.kind, found.phase) == (FailureKind.TIMEOUT, Phase.NUMERICS)
    assert "are too few" in found.reason


def test_a_fault_is_found_in_less_time_too(monkeypatch):
    found = proven_by(79.0, monkeypatch, "gradient_too_large")
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.WRONG


def test_a_process_that_proves_knows_when_it_will_be_ended():
    job = Job(kind="prove", workload="zoo:mlp", device="cpu", arms=(ArmSpec(name="candidate"),))
    before_s = time.monotonic()
    assert before_s + 50 <= within(job, Limits(total_s=50.0)).end_s <= time.monotonic() + 50
    assert within(job, Limits()).end_s is None
