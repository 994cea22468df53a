"""The quick gate on a real step, in this process."""

from pathlib import Path

import pytest

from tests.unit.tuner import overflowing_step
from tuner import gate
from tuner.gate import Proof, prove
from tuner.numerics import EARLY_STEPS, Trace
from tuner.probe import Probe
from tuner.protocol import ArmSpec, Job


def test_a_right_candidate_whose_first_steps_overflow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Trace] = []
    finite = gate._finite
    monkeypatch.setattr(gate, "_finite", lambda trace, *given: (traces.append(trace), finite(trace, *given))[1])
    knobs = {"precision": "fp16", "update": "fused"}
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    job = Job(workload=f"{Path(overflowing_step.__file__)}:make_workload", device="cpu", arms=arms)
    proof = prove(job, Probe(random=False, vary=True, step_ms=1.0, peak_bytes=0, parameters=1))
    assert set(range(EARLY_STEPS)) <= traces[0].skipped
    assert isinstance(proof, Proof), proof
    assert proof.numerics.note == ""
    assert proof.arm is not None
    proof.arm.close()
