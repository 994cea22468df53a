"""What the tuner measures of an arm on a GPU besides its time."""

import pytest

from tuner.building.arms import LiveArm
from tuner.building.probe import Probe, probe_workload
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.numerics_gate import Proof, prove
from tuner.numerics.training_trace import place_for

PLAIN = ArmSpec(name="plain")
WORKLOAD = "zoo:resnet18?batch=64"  # activations of some 100 MiB


@pytest.fixture(scope="module")
def plain_bytes():
    return peak_of({})


def peak_of(knobs):
    spec = ArmSpec(name="candidate", knobs=knobs)
    arm = LiveArm(Job(workload=WORKLOAD, device="cuda:0", arms=(PLAIN, spec)), spec)
    assert arm.settle()
    arm.weigh()
    arm.close()
    return arm.peak_bytes


@pytest.mark.parametrize(
    "knobs",
    [
        {"capture": "step"},
        {"capture": "step", "streams": 2},
        {"compile": "reduce-overhead"},
        {"compile": "default", "capture": "segments"},
    ],
    ids=str,
)
def test_what_a_graph_keeps_for_itself_is_memory_of_its_arm(knobs, plain_bytes):
    """Nothing here halves the memory of the step in fp32, nor triples it."""
    assert plain_bytes / 2 < peak_of(knobs) < plain_bytes * 3


@pytest.mark.parametrize("knobs", [{"precision": "bf16"}, {"precision": "bf16", "capture": "step"}], ids=str)
def test_what_the_gate_keeps_on_the_gpu_is_no_memory_of_the_step(knobs):
    job = Job(workload=WORKLOAD, device="cuda:0", arms=(PLAIN, ArmSpec(name="candidate", knobs=knobs)))
    probe = probe_workload(job)
    assert isinstance(probe, Probe)
    proof = prove(job, probe)
    assert isinstance(proof, Proof) and proof.arm is not None, proof
    assert place_for(proof.arm.workload.model, proof.arm.device, probe.peak_bytes) == proof.arm.device
    proof.arm.close()
    assert proof.arm.peak_bytes == pytest.approx(peak_of(knobs), abs=8 * 2**20)
