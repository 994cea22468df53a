"""The winner's gate on a GPU: a compiled and captured step in half precision, right and with planted faults."""

import pytest

from kitsune.long_proof import LongProof
from tuner.building.arms import LiveArm
from tuner.building.probe import Probe, probe_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics import long_gate
from tuner.numerics.depth import LEAST_STEPS
from tuner.numerics.long_gate import prove_long
from tuner.records import Failure, FailureKind

RESNET = "zoo:resnet18?batch=32"
GPT = "zoo:gpt2_small?size=tiny&batch=8&seq=64"
FASTEST = {"precision": "bf16", "compile": "default", "capture": "step", "update": "fused"}
CAPTURED = {"precision": "bf16", "capture": "step"}
BUDGET_S = 60.0


def proven(workload: str, knobs: dict[str, str]) -> LongProof | Failure:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    job = Job(workload=workload, device="cuda:0", arms=arms, budget_s=BUDGET_S)
    probe = probe_workload(job)
    assert isinstance(probe, Probe)
    return prove_long(job, probe)


def plant(monkeypatch, fault):
    """Into the candidate alone, and before its first step: compiled and captured, the fault is part of it."""

    class Faulty(LiveArm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if self.spec.name == "candidate":
                fault(self.workload)

    monkeypatch.setattr(long_gate, "LiveArm", Faulty)


@pytest.mark.parametrize(
    "knobs", [CAPTURED, FASTEST, {"compile": "reduce-overhead"}], ids=["captured", "fastest", "ro"]
)
@pytest.mark.parametrize("workload", [RESNET, GPT], ids=["resnet18", "gpt2"])
def test_a_winner_passes(workload, knobs):
    found = proven(workload, knobs)
    assert isinstance(found, LongProof), found
    assert found.steps >= LEAST_STEPS
    assert found.restarts >= 8
    assert found.updates >= 9
    assert (found.directions > 0) == (workload == GPT)
    assert all(margin.is_kept for margin in found.margins)


def drop_weight_decay(workload):
    for group in workload.optimizer.param_groups:
        group["weight_decay"] = 0.0


def change_beta2(workload):
    for group in workload.optimizer.param_groups:
        group["betas"] = (0.9, 0.99)


def drop_more(workload):
    workload.model.dropout.p = 0.3


@pytest.mark.parametrize("knobs", [CAPTURED, FASTEST], ids=["captured", "fastest"])
@pytest.mark.parametrize(
    ("workload", "fault", "found_by"),
    [
        (RESNET, drop_weight_decay, "update of"),
        (RESNET, change_beta2, "update of|state exp_avg_sq"),
        (GPT, drop_weight_decay, "update of"),
        (GPT, drop_more, "over seeds|rate of the dropout"),
    ],
)
def test_a_planted_fault_is_refused(monkeypatch, workload, fault, found_by, knobs):
    plant(monkeypatch, fault)
    found = proven(workload, knobs)
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.WRONG
    assert any(words in found.reason for words in found_by.split("|")), found.reason
