"""A measuring process with a memory limit: a step that needs more fails before it is compared or timed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kitsune import Workload
from tuner.child.measure_job import measure_job
from tuner.measuring.protocol import ArmSpec, Job
from tuner.records import Failure, FailureKind, Measurement, Phase

MIB = 2**20
ROWS, WIDTH = 1024, 128  # 0.5 MiB in fp32
BLOCKS = {"recompute": "blocks"}


def deep() -> Workload:
    """Eight blocks, of which each keeps some MiB."""
    parts = ((nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(8))
    model = nn.Sequential(*(nn.Sequential(*each) for each in parts))
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return Workload(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def measured(limit_bytes: int | None, *, numerics: bool = True, **knobs) -> Measurement | Failure:
    arms = (ArmSpec(name="eager"), ArmSpec(name="candidate", knobs=knobs))
    job = Job(
        workload=f"{Path(__file__)}:deep",
        device="cpu",
        arms=arms,
        rounds=2,
        block_ms=1.0,
        numerics=numerics,
        memory_limit_bytes=limit_bytes,
    )
    return measure_job(job, lambda _: None)


def test_memory_is_measured_and_recomputing_saves_some():
    given, found = (measured(10_000 * MIB, **knobs) for knobs in ({}, BLOCKS))
    peaks = given.arms[-1].peak_bytes, found.arms[-1].peak_bytes
    assert 12 * MIB < peaks[0] < 24 * MIB
    assert peaks[1] < peaks[0] - 5 * MIB
    assert found.arms[0].peak_bytes == pytest.approx(peaks[0], rel=0.1)


@pytest.mark.parametrize(("numerics", "phase"), [(True, Phase.NUMERICS), (False, Phase.WARMUP)])
def test_a_candidate_that_needs_more_fails_and_says_what_it_needs(numerics, phase):
    given = measured(12 * MIB, numerics=numerics)
    assert isinstance(given, Failure), given
    assert (given.kind, given.phase) == (FailureKind.TOO_LARGE, phase)
    assert 12 * MIB < given.peak_bytes < 24 * MIB
    assert given.reason.startswith("a step needs 1")
    assert given.reason.endswith(" MiB, more than the limit of 12 MiB")


def test_one_that_fits_is_measured_beside_a_step_as_given_that_does_not():
    found = measured(12 * MIB, **BLOCKS)
    assert isinstance(found, Measurement), found
    assert found.arms[-1].peak_bytes <= 12 * MIB < found.arms[0].peak_bytes


def test_without_a_limit_no_memory_of_a_cpu_is_measured():
    assert {arm.peak_bytes for arm in measured(None).arms} == {0}
