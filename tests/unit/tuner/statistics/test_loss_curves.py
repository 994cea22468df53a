"""Whether two sets of curves are the same training."""

import random

import pytest

from tuner.statistics.loss_curves import Curve, Learned, judge


def curves(plain, plan, start=2.0):
    """Each number is where the held-out loss of a seed ends."""
    return [
        Curve(seed=seed, arm=arm, start=start, steps=(1, 2), trained=(start, final), held_out=(start, final))
        for arm, finals in (("plain", plain), ("plan", plan))
        for seed, final in enumerate(finals)
    ]


def test_losses_within_the_spread_of_the_seeds_are_the_same():
    found = judge(curves([0.50, 0.52, 0.54], [0.51, 0.53, 0.56]))
    assert found.verdict is Learned.SAME
    assert found.plain == pytest.approx(0.52)
    assert found.plan == pytest.approx(0.5333, abs=1e-4)
    assert 0.01 < found.allowed < 0.1


@pytest.mark.parametrize("plan", [[0.70, 0.72, 0.74], [0.30, 0.32, 0.34]], ids=["worse", "better"])
def test_losses_beyond_it_differ_whichever_is_lower(plan):
    """What learns better is another training too: dropout that is off does."""
    found = judge(curves([0.50, 0.52, 0.54], plan))
    assert found.verdict is Learned.DIFFERS
    assert "by the plan" in found.reason


def test_where_nothing_is_learnt_nothing_is_proven():
    found = judge(curves([1.99, 2.0, 2.01], [1.99, 2.0, 2.01]))
    assert found.verdict is Learned.UNCLEAR
    assert "learns nothing" in found.reason


def test_seeds_that_give_one_training_prove_nothing():
    found = judge(curves([0.5, 0.5, 0.5], [0.52, 0.52, 0.52]))
    assert found.verdict is Learned.UNCLEAR
    assert "every seed gave the same training" in found.reason


def test_seeds_far_apart_prove_nothing():
    found = judge(curves([0.1, 1.5], [0.2, 1.4]))
    assert found.verdict is Learned.UNCLEAR
    assert "more --seeds" in found.reason


@pytest.mark.parametrize(("arm", "verdict"), [("plain", Learned.UNCLEAR), ("plan", Learned.DIFFERS)])
def test_a_training_that_ends_in_nan_is_the_plans_fault_only_where_the_given_one_does_not(arm, verdict):
    found = [
        curve.model_copy(update={"ended": "the loss is not finite by step 7"}) if curve.arm == arm else curve
        for curve in curves([0.5, 0.6], [0.5, 0.6])
    ]
    outcome = judge(found)
    assert outcome.verdict is verdict
    assert "step 7" in outcome.reason


def test_one_seed_has_no_spread():
    with pytest.raises(ValueError, match="two seeds"):
        judge(curves([0.5], [0.5]))


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_equal_trainings_are_told_apart_once_in_a_hundred_times(seeds):
    """Even where rounding alone makes each a training of its own."""
    rng = random.Random(seeds)

    def finals():
        return [rng.gauss(0.5, 0.005) for _ in range(seeds)]

    outcomes = [judge(curves(finals(), finals())).verdict for _ in range(2000)]
    assert outcomes.count(Learned.DIFFERS) <= 35  # of 20 that are expected
    assert outcomes.count(Learned.DIFFERS) >= 6
