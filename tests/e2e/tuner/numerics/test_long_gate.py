"""A measuring process proves a winner at length, and looks at its numbers after the timing."""

from kitsune.long_proof import LongProof
from tests.one_job import outcome_of
from tests.unit.tuner.numerics.test_long_gate import FAULTY
from tuner.measuring.protocol import ArmSpec, Job
from tuner.records import Failure, FailureKind, Phase


def test_a_child_proves_a_winner_at_length():
    knobs = {"precision": "bf16", "update": "fused"}
    arms = (ArmSpec(name="candidate", knobs=knobs),)
    workload = "zoo:bert_base?size=tiny&batch=4&seq=16"
    job = Job(kind="prove", workload=workload, device="cpu", arms=arms, budget_s=5.0)
    found = outcome_of(job)
    assert isinstance(found, LongProof), found
    assert found.directions > 0
    assert found.nearest in found.margins
    assert LongProof.model_validate_json(found.model_dump_json()) == found


def test_what_is_not_finite_only_after_many_steps_is_seen_after_the_timing():
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs={"layout": "channels_last"}))
    job = Job(workload=f"{FAULTY}:nan_later", device="cpu", arms=arms, rounds=24, block_ms=0.001)  # one step a block
    found = outcome_of(job)
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (FailureKind.NOT_FINITE, Phase.TIMING)
    assert "after the steps that were timed" in found.reason
