"""What a measuring process answers to a job, asked within this one; tests/e2e/test_measure.py has real ones."""

import shutil
from pathlib import Path

import pytest

from tests import behaviours
from tuner.child.main import outcome_of
from tuner.measuring.protocol import ArmSpec, Inspection, Job, Outcome
from tuner.records import Failure, FailureKind, Measurement, Phase


class Phases:
    """A channel to nobody: it only keeps the phase."""

    phase = Phase.START

    def enter(self, phase: Phase) -> None:
        self.phase = phase


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(behaviours.__file__, tmp_path / "workloads.py"))


def inspect(workload: str) -> Outcome:
    phases = Phases()
    phases.enter(Phase.BUILD)
    return outcome_of(Job(kind="inspect", workload=workload, device="cpu"), phases)


def measure(workload: str, **knobs: str) -> Outcome:
    arms = (ArmSpec(name="baseline"), ArmSpec(name="candidate", knobs=knobs))
    phases = Phases()
    phases.enter(Phase.BUILD)
    return outcome_of(Job(workload=workload, device="cpu", arms=arms, rounds=3, block_ms=5), phases)


def test_a_workload_that_cannot_be_exported_has_a_fingerprint_of_this_machine(file):
    found = inspect(f"{file}:branches")
    assert isinstance(found, Inspection), found
    assert found.fingerprint.startswith("local-")
    assert any("not exportable" in note for note in found.notes)


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("raises", FailureKind.RAISED, "ValueError: no such luck (workloads.py:"),
        ("eats_memory", FailureKind.OUT_OF_MEMORY, "allocate"),
        ("is_nan", FailureKind.NOT_FINITE, "not finite"),
        ("embeds_sparsely", FailureKind.RAISED, "the gradient of embedding.weight is sparse"),
        ("trains_by_closures", FailureKind.RAISED, "LBFGS evaluates a closure"),
        ("absent", FailureKind.RAISED, "has no function 'absent'"),
    ],
)
def test_a_workload_that_fails_as_given(file, function, kind, words):
    found = inspect(f"{file}:{function}")
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (kind, Phase.BUILD)
    assert words in found.reason


def test_a_choice_that_does_not_apply_is_declined(file):
    found = measure(f"{file}:with_dropout", capture="step")
    assert isinstance(found, Failure), found
    assert found.kind is FailureKind.DECLINED
    assert "capture" in found.reason


@pytest.mark.parametrize(
    ("function", "knobs", "kind", "words"),
    [
        ("wrong_under_autocast", {"precision": "bf16"}, FailureKind.WRONG, "at step 0"),
        ("nan_under_autocast", {"precision": "bf16"}, FailureKind.NOT_FINITE, "at step 0"),
        ("wrong_under_channels_last", {"layout": "channels_last"}, FailureKind.WRONG, "is allowed"),
        ("noisy_and_wrong_under_autocast", {"precision": "bf16"}, FailureKind.WRONG, "mean"),
    ],
)
def test_wrong_numbers_are_found_before_the_clock_starts(file, function, knobs, kind, words):
    found = measure(f"{file}:{function}", **knobs)
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (kind, Phase.NUMERICS)
    assert words in found.reason


def test_a_frozen_dropout_mask_is_found(file):
    found = measure(f"{file}:freezes_dropout_under_autocast", precision="bf16")
    assert isinstance(found, Failure), found
    assert (found.kind, found.phase) == (FailureKind.WRONG, Phase.WARMUP)
    assert "dropout mask is frozen" in found.reason


def test_randomness_that_cannot_be_switched_off_is_compared_by_means(file):
    found = measure(f"{file}:noisy", precision="bf16")
    assert isinstance(found, Measurement), found
    assert found.numerics is not None
    assert "means" in found.numerics.note
