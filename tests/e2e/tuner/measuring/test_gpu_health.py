"""Self-tests of a GPU as processes: what they answer decides whether a worker quarantines it."""

import sys

import pytest

from tests.unit.tuner.measuring.test_gpu_health import ASSERT, BROKEN, WELL, says
from tuner.measuring.gpu_health import Fitness


def test_a_sticky_error_does_not_quarantine_a_gpu_that_still_works():
    assert says(WELL).why_unfit(ASSERT) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (BROKEN, "cuInit answered 999"),
        ("raise SystemExit(7)", "it ended with 7"),
        ("print('what?')", "its answer cannot be read"),
        ("print('[]')", "its answer cannot be read"),
    ],
)
def test_a_gpu_that_does_not_work_is_quarantined_with_the_reason(answer, words):
    why = says(answer).why_unfit(ASSERT)
    assert why is not None
    assert why.startswith("cuda:0 is quarantined: its self-test fails")
    assert words in why


def test_a_self_test_that_hangs_is_a_reason():
    fitness = Fitness("cuda:0", (sys.executable, "-c", "import time; time.sleep(60)"), patience_s=0.5)
    assert "took longer than 0.5 s" in (fitness.why_unfit(ASSERT) or "")
