"""The time budget of timing in a measuring process."""

import time

import pytest

from tuner.child.measure_job import LEFT_SHARE, _budget_s
from tuner.measuring.protocol import ArmSpec, Job

JOB = Job(workload="zoo:mlp", device="cpu", arms=(ArmSpec(name="baseline"), ArmSpec(name="candidate")))


@pytest.mark.parametrize(
    ("budget_s", "left_s", "expected"),
    [(None, None, None), (9.0, None, 9.0), (9.0, 100.0, 9.0), (90.0, 10.0, 8.0), (None, 10.0, 8.0), (9.0, -1.0, 0.0)],
)
def test_timing_ends_before_the_process_is_ended(budget_s, left_s, expected):
    end_s = None if left_s is None else time.monotonic() + left_s
    found = _budget_s(JOB.model_copy(update={"budget_s": budget_s, "end_s": end_s}))
    assert found == (expected if expected is None else pytest.approx(expected, abs=0.1))
    assert LEFT_SHARE < 1
