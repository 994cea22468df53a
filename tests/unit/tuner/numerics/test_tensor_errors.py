"""The verdict over comparisons at many steps: telling rounding from a tensor that is too large."""

from collections.abc import Sequence

import pytest

from kitsune.long_proof import Margin
from kitsune.techniques import tolerance
from tuner.numerics.tensor_errors import (
    ErrorSamples,
    StepErrors,
    TensorErrors,
    judge_comparisons,
    judge_windows,
    window_errors,
)

BF16 = tolerance({"precision": "bf16"})
#: Of the last norm of a right nanoGPT at 6 moments of 20 steps on an H100 (bf16, reduce-overhead): how far its share
#: and that of the step as given in bf16 are off, as its gradient gets smaller.
COMPILED = (0.00241, 0.00554, 0.01105, 0.02095, 0.03336, 0.04191)
EAGER = (0.00293, 0.00366, 0.00269, 0.01223, 0.00341, 0.00752)
QUIET = (0.0010, 0.0013, 0.0009, 0.0012, 0.0011, 0.0008)


def comparison(off: float) -> StepErrors:
    gradients = TensorErrors(errors=[0.02, 0.02, 0.02], shares=[1 + off, 1.001, 1.0012], sizes=[1.0, 1.0, 1.0])
    return StepErrors(loss=0.0, whole=0.01, gradients=gradients, buffers=TensorErrors([], [], []))


def broken(ours: Sequence[float], eager: Sequence[float]) -> list[Margin]:
    found = ErrorSamples([comparison(off) for off in ours], [[comparison(off) for off in eager]] * 2)
    margins = judge_comparisons(found, BF16, ["norm", "head", "body"], [])
    return [margin for margin in margins if not margin.is_kept]


def test_a_share_that_rounding_moves_from_moment_to_moment_is_right():
    assert broken(COMPILED, EAGER) == []


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_gradient_that_is_one_percent_off_at_every_moment_is_not(factor):
    found = broken([factor * (1 + off) - 1 for off in QUIET], QUIET)
    assert ("share of the gradient of", "norm") in {(margin.what, margin.where) for margin in found}


@pytest.mark.parametrize("factor", [0.0, 2.0])
@pytest.mark.parametrize("every", [6, 8, 16])
def test_a_gradient_that_is_wrong_now_and_then_does_not_excuse_itself(factor, every):
    moments = [QUIET[number % len(QUIET)] for number in range(16)]
    ours = [factor - 1 if number % every == 3 else off for number, off in enumerate(moments)]
    assert ("share of the gradient of", "norm") in {(each.what, each.where) for each in broken(ours, moments)}


def test_neither_is_one_that_leaves_its_share_by_more_than_chance():
    noisy = [0.05 + off for off in COMPILED]
    assert "share of the gradient of" in {margin.what for margin in broken(noisy, EAGER)}


WINDOW = 5
GIVEN = [11 - 0.05 * step for step in range(55)]
#: Losses of yardsticks: 0.2 % off.
QUIET_TRAININGS = [[loss * factor for loss in GIVEN] for factor in (1.002, 0.998)]


def judged(ours: Sequence[float]) -> Margin:
    theirs = [window_errors(losses, GIVEN, WINDOW) for losses in QUIET_TRAININGS]
    return judge_windows(window_errors(ours, GIVEN, WINDOW), theirs)


@pytest.mark.parametrize("begin", range(0, 55, 3))
def test_a_spike_of_the_loss_is_no_drift(begin):
    """Wherever it comes, also at the end: yardsticks without a spike show that it is rare, and it does not last."""
    ours = [1.4 * loss if begin <= step < begin + 11 else loss for step, loss in enumerate(GIVEN)]
    assert judged(ours).is_kept


@pytest.mark.parametrize("begin", [0, 10, 25, 35])
def test_a_loss_that_stays_off_is(begin):
    margin = judged([1.05 * loss if step >= begin else loss for step, loss in enumerate(GIVEN)])
    assert not margin.is_kept
    assert margin.what == "mean loss of steps"


@pytest.mark.parametrize("steps", [3, 10, 20])
def test_few_windows_are_judged_as_well(steps):
    theirs = [window_errors(losses[:steps], GIVEN[:steps], WINDOW) for losses in QUIET_TRAININGS]
    assert not judge_windows(
        window_errors([1.05 * loss for loss in GIVEN[:steps]], GIVEN[:steps], WINDOW), theirs
    ).is_kept
    assert judge_windows(theirs[0], theirs).is_kept
