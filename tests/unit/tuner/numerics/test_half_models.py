"""The numerics gate on a model given in bf16: its reference has a wider dtype, also where float64 is too slow."""

from pathlib import Path

import pytest
import torch

from kitsune import Workload
from kitsune.techniques.precision import precision_of
from tests.unit.tuner import faulty_steps
from tuner.building.arms import LiveArm
from tuner.building.probe import Probe
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.numerics_gate import Proof, prove
from tuner.numerics.reference import reference_step
from tuner.numerics.training_trace import perturb, start_of
from tuner.records import Failure, FailureKind

#: What the gate says of its reference -> seconds that float64 may take.
NOTES = {"": None, "the reference is fp32, the model is not": 1e-9}


PROBE = Probe(random=False, vary=True, step_ms=1.0, peak_bytes=0, parameters=1)


class HardCoded(torch.nn.Conv2d):
    """Computes in bf16 only."""

    def forward(self, x):
        return super().forward(x.bfloat16())


def hard_coded() -> Workload:
    model = torch.nn.Sequential(HardCoded(3, 4, 3), torch.nn.Flatten()).bfloat16()
    batch = torch.randn(16, 3, 5, 5), torch.randint(36, (16,))
    return Workload(model, torch.nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), 1e-3), batch)


def job_at(workload: str, reference_s: float | None = None) -> Job:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs={"layout": "channels_last"}))
    return Job(workload=workload, device="cpu", arms=arms, reference_s=reference_s)


def job_of(fault: str, reference_s: float | None = None) -> Job:
    return job_at(f"{Path(faulty_steps.__file__)}:{fault}_in_bf16", reference_s)


def proven(fault: str, reference_s: float | None) -> Proof | Failure:
    return prove(job_of(fault, reference_s), PROBE)


@pytest.mark.parametrize("note", NOTES)
def test_a_right_candidate_passes(note):
    found = proven("right", NOTES[note])
    assert isinstance(found, Proof), found
    assert found.numerics.note == note
    assert 1e-3 < found.numerics.gradient_error < found.numerics.gradient_allowed
    found.arm.close()


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("fault", ["weight_gradient_zero_now_and_then", "loss_doubled"])
def test_a_planted_fault_is_refused(fault, note):
    found = proven(fault, NOTES[note])
    assert isinstance(found, Failure), found
    assert found.kind is FailureKind.WRONG


def test_a_model_that_fails_in_other_dtypes_has_a_reference_as_given():
    found = prove(job_at(f"{__file__}:hard_coded"), PROBE)
    assert isinstance(found, Proof), found
    assert found.numerics.note == "the reference is in half precision, as given"
    assert found.numerics.gradient_allowed >= 5e-2
    found.arm.close()


def test_a_perturbed_start_differs_in_every_format():
    for name in ("right", "right_in_bf16"):
        workload = getattr(faulty_steps, name)()
        start = start_of(workload)
        perturb(workload, 0)
        weight, before = workload.model.hidden.weight.detach(), start.parameters[start.names.index("hidden.weight")]
        assert 0 < (weight - before).norm() < 8 * torch.finfo(weight.dtype).eps * before.norm()


def test_complex_numbers_of_a_model_stay_complex():
    model = torch.nn.Linear(4, 4).bfloat16()
    model.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))
    for dtype in (torch.float32, torch.float64):
        reference_step(Workload(model, None, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(2, 4), None)), dtype)
        assert (model.weight.dtype, model.turns.is_complex()) == (dtype, True)


@pytest.mark.parametrize(("halves", "precision"), [(0, "fp32"), (1, "fp32"), (3, "bf16"), (4, "bf16")])
def test_a_model_has_the_precision_of_most_of_its_parameters(halves, precision):
    parameters = [torch.zeros(2, dtype=torch.bfloat16 if place < halves else torch.float32) for place in range(4)]
    assert precision_of({}, parameters) == precision
    assert precision_of({"precision": "tf32"}, parameters) == (precision if precision == "bf16" else "tf32")


def test_only_a_yardstick_in_the_precision_of_its_reference_is_perturbed():
    """Where the reference is in fp32, rounding is an error of its own: a perturbation would hide ten times as much."""
    found = proven("right", 1e-9)
    assert found.numerics.parameter_allowed < 4 * max(found.numerics.parameter_error, 0.1)
    found.arm.close()


def test_the_floor_of_errors_is_that_of_the_parameters():
    arm = LiveArm(job_of("right"), ArmSpec(name="yardstick"))
    assert (arm.precision, arm.tolerance.gradient) == ("bf16", 5e-2)
    arm.close()
