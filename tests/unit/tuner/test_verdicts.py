import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.knobs import KNOBS
from kitsune.plan import Plan
from kitsune.screen import ITSELF, spread
from tests.unit.tuner.machine import ENVIRONMENT, numerics
from tuner.protocol import Inspection
from tuner.records import Arm, Measurement, Verdict
from tuner.stats import compare, median, samples_digest
from tuner.verdicts import (
    CANDIDATE,
    EAGER,
    PROVEN_BEFORE,
    STOCK,
    UNCHANGED,
    Decision,
    confirmation_arms,
    decide,
    plan_from,
    words,
)

BF16, GRAPH = {"precision": "bf16"}, {"precision": "bf16", "capture": "step"}
CANDIDATE_NUMERICS, STOCK_NUMERICS = numerics(1e-3), numerics(2e-3)

some_knobs = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(list(knob.choices)[1:]) for name, knob in KNOBS.items()}
)
INSPECTION = Inspection(
    environment=ENVIRONMENT,
    fingerprint="f",
    model_fingerprint="m",
    batch="16x128",
    inapplicable={},
    random=False,
    step_ms=1.0,
    peak_bytes=1,
    parameters=1,
)
times = st.floats(0.1, 100)


def measured(eager_ms: float, stock_ms: float | None, candidate_ms: float | None, **changes: object) -> Measurement:
    """A confirmation of 30 rounds with noise of a permille; None leaves the arm out."""
    noise, rounds = float(changes.get("noise", 0.001)), int(changes.get("rounds", 30))
    wanted = [
        (EAGER, {}, eager_ms),
        (STOCK, BF16, stock_ms),
        (CANDIDATE, changes.get("candidate", GRAPH), candidate_ms),
    ]
    arms = [
        Arm(
            name=name,
            knobs=knobs,
            step_ms=tuple(mean * random.Random(f"{name}{i}").lognormvariate(0, noise) for i in range(rounds)),
            peak_bytes=100 + index,
            first_step_s=index,
        )
        for index, (name, knobs, mean) in enumerate(wanted)
        if mean is not None
    ]
    return Measurement(
        arms=tuple(arms), steps_per_block=(1,) * len(arms), numerics=CANDIDATE_NUMERICS, environment=ENVIRONMENT
    )


def planned(measurement: Measurement, noise_floor: float = 0.0) -> tuple[Plan, Decision]:
    decision = decide(measurement, noise_floor)
    return plan_from(measurement, decision, "run", INSPECTION, STOCK_NUMERICS), decision


@pytest.mark.parametrize(
    ("eager_ms", "stock_ms", "candidate_ms", "chosen", "baseline"),
    [
        (10, 8, 5, CANDIDATE, STOCK),
        (10, None, 5, CANDIDATE, EAGER),
        (10, 12, 5, CANDIDATE, EAGER),  # stock was lucky in the search: the better rival counts
        (10, 12, 11, EAGER, EAGER),  # faster than that stock, but slower than the step as given
        (10, 8, 8, STOCK, STOCK),
        (10, 8, 9, STOCK, STOCK),
        (10, 8, None, STOCK, STOCK),  # the candidate is the stock configuration
        (10, 10, 10, EAGER, EAGER),
        (10, 12, None, EAGER, EAGER),
        (10, None, 12, EAGER, EAGER),
    ],
)
def test_the_plan_is_what_the_samples_allow(eager_ms, stock_ms, candidate_ms, chosen, baseline):
    measurement = measured(eager_ms, stock_ms, candidate_ms)
    plan, decision = planned(measurement)
    assert (decision.chosen, decision.baseline) == (chosen, baseline)
    assert decision.verdict is (Verdict.FASTER if chosen == CANDIDATE else Verdict.SAME)
    assert plan.knobs == {EAGER: {}, STOCK: BF16, CANDIDATE: GRAPH}[chosen]
    assert plan.evidence.verdict == decision.verdict.value
    assert plan.evidence.speedup.is_itself == (chosen == baseline)
    assert (spread(plan.evidence.speedup) == ITSELF) == (chosen == baseline)


@settings(max_examples=60)
@given(times, st.none() | times, st.none() | times, st.floats(0, 0.2), st.floats(1e-4, 0.3), st.integers(1, 40))
def test_the_evidence_is_consistent(eager_ms, stock_ms, candidate_ms, noise_floor, noise, rounds):
    if stock_ms is None and candidate_ms is None:
        stock_ms = eager_ms
    measurement = measured(eager_ms, stock_ms, candidate_ms, noise=noise, rounds=rounds)
    plan, decision = planned(measurement, noise_floor)
    evidence = plan.evidence
    arms = {arm.name: arm for arm in measurement.arms}
    base, winner = arms[decision.baseline], arms[decision.chosen]
    assert (evidence.baseline_step_ms, evidence.step_ms) == (median(base.step_ms), median(winner.step_ms))
    assert (evidence.baseline_peak_bytes, evidence.peak_bytes) == (base.peak_bytes, winner.peak_bytes)
    assert (evidence.baseline, evidence.blocks) == (words(base.knobs), rounds)
    assert evidence.eager_step_ms == median(arms[EAGER].step_ms)
    assert evidence.samples_sha256 == samples_digest(measurement)
    for ratio, interval in (
        (evidence.baseline_step_ms / evidence.step_ms, evidence.speedup),
        (evidence.eager_step_ms / evidence.step_ms, evidence.speedup_over_eager),
    ):
        assert interval.low <= interval.median <= interval.high
        assert interval.median == pytest.approx(ratio, rel=3 * noise)
    if evidence.verdict == "faster":
        assert evidence.speedup.low > 1 + noise_floor
        assert evidence.speedup_over_eager.median > 1
    else:
        assert evidence.speedup.low == evidence.speedup.high == 1
    assert (evidence.speedup_over_eager.low > 1 + noise_floor) or not plan.knobs or evidence.verdict == "faster"
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_tells_of_its_own_numerics():
    assert planned(measured(10, 8, 5))[0].evidence.numerics == CANDIDATE_NUMERICS
    assert planned(measured(10, 8, None))[0].evidence.numerics == CANDIDATE_NUMERICS, "stock was the arm that is proven"
    assert planned(measured(10, 10, 10))[0].evidence.numerics == UNCHANGED
    fallen_back = planned(measured(10, 8, 9))[0].evidence.numerics
    assert fallen_back == STOCK_NUMERICS.model_copy(update={"note": PROVEN_BEFORE})


def test_a_candidate_that_changes_nothing_is_never_faster():
    measurement = measured(10, None, 5, candidate={})
    plan, decision = planned(measurement)
    assert (decision.verdict, decision.is_open, plan.knobs) == (Verdict.SAME, False, {})
    assert plan.evidence.speedup.median == plan.evidence.speedup_over_eager.median == 1


def test_the_noise_floor_is_the_margin():
    measurement = measured(10, None, 9.5)
    assert decide(measurement, 0.02).verdict is Verdict.FASTER
    assert decide(measurement, 0.08).verdict is Verdict.SAME
    stock_alone = measured(10, 9.5, None)
    assert [decide(stock_alone, floor).chosen for floor in (0.02, 0.08)] == [STOCK, EAGER]


@pytest.mark.parametrize(
    ("candidate_ms", "noise", "floor", "is_open"),
    [
        (9.9, 0.10, 0.0, True),
        (9.9, 0.10, 0.5, False),  # the whole interval is within the noise floor: more rounds would not help
        (10.4, 0.05, 0.0, False),  # unclear, but surely no gain
        (12.0, 0.10, 0.0, False),
        (5.0, 0.10, 0.0, False),
        (10.0, 0.0001, 0.0, False),
    ],
)
def test_only_a_possible_gain_is_left_open(candidate_ms, noise, floor, is_open):
    assert decide(measured(10, None, candidate_ms, noise=noise), floor).is_open is is_open


def test_a_stock_configuration_whose_own_gain_is_unclear_is_left_open():
    decision = decide(measured(10, 9.9, None, noise=0.1))
    assert decision.comparison.verdict is Verdict.SAME, "it is its own baseline"
    assert decision.is_open


def test_too_few_rounds_decide_nothing():
    assert decide(measured(10, 8, 2, rounds=5)).chosen == EAGER


@given(some_knobs, st.none() | some_knobs)
def test_no_configuration_is_confirmed_twice(candidate, stock):
    arms = confirmation_arms(candidate, stock)
    assert arms[0].knobs == {}
    assert arms[-1].knobs == candidate, "the last arm is the one that is proven"
    assert len(arms) >= 2
    if candidate:
        assert len({tuple(arm.knobs.items()) for arm in arms}) == len(arms)
    if stock:
        assert stock in [arm.knobs for arm in arms]


@given(some_knobs)
def test_words_are_in_the_order_of_the_table(knobs):
    assert words(dict(reversed(knobs.items()))) == words(knobs)
    named = [part.partition("=")[0] for part in words(knobs).split(", ")] if knobs else []
    assert named == [name for name in KNOBS if name in knobs]
    assert words({}) == "eager"


def test_the_comparison_is_of_pairs():
    measurement = measured(10, 8, 5)
    eager, stock, candidate = (arm.step_ms for arm in measurement.arms)
    assert decide(measurement).comparison == compare(stock, candidate)
    assert planned(measurement)[0].evidence.speedup_over_eager == compare(eager, candidate).speedup
