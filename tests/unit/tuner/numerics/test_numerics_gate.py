"""The numerics gate on a real step, in this process."""

from pathlib import Path

import pytest

from tests.unit.tuner import faulty_steps, overflowing_step
from tuner.building.probe import Probe
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics import numerics_gate
from tuner.numerics.numerics_gate import Proof, prove
from tuner.numerics.trace_errors import EARLY_STEPS, Trace
from tuner.records import Failure, FailureKind, Phase


def test_a_right_candidate_whose_first_steps_overflow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Trace] = []
    finite = numerics_gate._finite
    monkeypatch.setattr(
        numerics_gate, "_finite", lambda trace, *given: (traces.append(trace), finite(trace, *given))[1]
    )
    knobs = {"precision": "fp16", "update": "fused"}
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    job = Job(workload=f"{Path(overflowing_step.__file__)}:make_workload", device="cpu", arms=arms)
    proof = prove(job, Probe(random=False, vary=True, step_ms=1.0, peak_bytes=0, parameters=1))
    assert set(range(EARLY_STEPS)) <= traces[0].skipped
    assert isinstance(proof, Proof), proof
    assert proof.numerics.note == ""
    assert proof.arm is not None
    proof.arm.close()


def test_a_bias_gradient_of_other_memory_is_refused() -> None:
    """As torch 2.10 computed it for a convolution to whose output a broadcast tensor is added (pytorch#190796)."""
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs={"layout": "channels_last"}))
    fault = f"{faulty_steps.__file__}:convolution_bias_gradient_of_other_memory"
    job = Job(workload=fault, device="cpu", arms=arms)
    found = prove(job, Probe(random=False, vary=True, step_ms=1.0, peak_bytes=0, parameters=1))
    assert isinstance(found, Failure), found
    assert (found.phase, found.kind) == (Phase.NUMERICS, FailureKind.WRONG)
    assert found.reason.startswith("gradients at step")
