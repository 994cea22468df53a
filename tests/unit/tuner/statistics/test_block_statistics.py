import hashlib
import json
import math
import random
from collections import Counter
from itertools import product
from statistics import NormalDist

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kitsune.errors import MeasureError
from kitsune.plan import Environment
from tuner.records import Arm, Measurement, Verdict
from tuner.statistics.block_statistics import (
    bootstrap_interval,
    compare,
    exact_p,
    log_ratios,
    noise_floor,
    normal_p,
    order,
    samples_digest,
    verdict,
    wilcoxon_p,
)

MIRRORED = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.AMBIGUOUS: Verdict.AMBIGUOUS,
}
times_ms = st.floats(min_value=0.01, max_value=1e4, allow_nan=False)
pairs = st.lists(st.tuples(times_ms, times_ms), min_size=1, max_size=40)
quick = settings(max_examples=60)


def block_times(speedup: float, rounds: int, seed: int, *, interleaved: bool = True) -> tuple[list[float], list[float]]:
    """Blocks of two arms on a machine whose clock drifts: 1 % ramp, 0.3 % slow noise, 0.3 % fast noise."""
    rng = random.Random(seed)
    ramp, slow = rng.gauss(0, 0.01), 0.0
    schedule = [arm for round_ in order(rounds, 2, seed) for arm in round_]
    samples: dict[int, list[float]] = {0: [], 1: []}
    for index, arm in enumerate(schedule if interleaved else sorted(schedule)):
        slow = 0.9 * slow + rng.gauss(0, 0.003 * math.sqrt(1 - 0.9**2))
        drift = 1 + ramp * index / (2 * rounds) + slow
        samples[arm].append(10 / (speedup if arm else 1) * drift * (1 + rng.gauss(0, 0.003)))
    return samples[0], samples[1]


def verdicts(speedup: float, rounds: int, runs: int) -> Counter[Verdict]:
    return Counter(
        compare(*block_times(speedup, rounds, seed), seed=seed, resamples=400).verdict for seed in range(runs)
    )


def test_the_step_against_itself_is_hardly_ever_called_faster() -> None:
    found = verdicts(1.0, rounds=20, runs=250)
    assert found[Verdict.FASTER] <= 2
    assert found[Verdict.SLOWER] <= 2


def test_without_a_threshold_the_false_alarms_of_a_drifting_machine_stay_near_one_percent() -> None:
    alarms = 0
    for seed in range(1000):
        baseline, candidate = block_times(1.0, 20, seed)
        alarms += wilcoxon_p(log_ratios(baseline, candidate)) < 0.01
    assert 0 < alarms <= 20


def test_one_arm_after_the_other_would_be_fooled_by_the_drift() -> None:
    samples = [block_times(1.0, 20, seed, interleaved=False) for seed in range(200)]
    assert sum(wilcoxon_p(log_ratios(*pair)) < 0.01 for pair in samples) > 60


def test_a_planted_gain_of_one_and_a_half_percent_is_found() -> None:
    assert verdicts(1.015, rounds=30, runs=60)[Verdict.FASTER] >= 57


def test_a_planted_gain_of_one_percent_is_found_and_never_called_slower_or_same() -> None:
    found = verdicts(1.01, rounds=30, runs=60)
    assert found[Verdict.FASTER] >= 50
    assert set(found) <= {Verdict.FASTER, Verdict.AMBIGUOUS}


def test_equal_arms_on_a_quiet_machine_are_the_same() -> None:
    assert verdicts(1.0, rounds=30, runs=60)[Verdict.SAME] >= 50


def test_a_clear_difference_gives_its_size_and_interval() -> None:
    baseline, candidate = block_times(1.25, 30, seed=7)
    found = compare(baseline, candidate)
    assert found.verdict is Verdict.FASTER
    assert found.speedup.low < 1.25 < found.speedup.high
    assert found.speedup.median == pytest.approx(1.25, rel=0.005)
    assert found.blocks == 30


@pytest.mark.parametrize("blocks", [1, 5])
def test_too_few_blocks_are_ambiguous_however_clear(blocks: int) -> None:
    assert compare([20.0] * blocks, [10.0] * blocks).verdict is Verdict.AMBIGUOUS


def test_eight_blocks_can_decide() -> None:
    rng = random.Random(0)
    assert (
        compare([20 + rng.random() for _ in range(8)], [10 + rng.random() for _ in range(8)]).verdict is Verdict.FASTER
    )


def test_noise_floor_is_the_worst_side_of_the_interval() -> None:
    found = compare(*block_times(1.0, 20, seed=5))
    floor = noise_floor(found)
    assert 1 / (1 + floor) <= found.speedup.low * (1 + 1e-12)
    assert found.speedup.high <= (1 + floor) * (1 + 1e-12)
    assert floor == pytest.approx(max(found.speedup.high - 1, 1 / found.speedup.low - 1))


def test_a_noise_floor_that_excludes_nothing_is_infinite() -> None:
    found = compare(*block_times(1.0, 20, seed=5))
    endless = found.model_copy(update={"speedup": found.speedup.model_copy(update={"low": 0.0})})
    assert noise_floor(endless) == math.inf


@pytest.mark.parametrize(
    ("low", "high", "p_value", "said"),
    [
        (0.006, 0.02, 0.001, Verdict.FASTER),
        (0.006, 0.02, 0.02, Verdict.AMBIGUOUS),
        (0.004, 0.02, 0.001, Verdict.AMBIGUOUS),
        (-0.02, -0.006, 0.001, Verdict.SLOWER),
        (0.001, 0.004, 0.001, Verdict.SAME),
        (-0.009, 0.009, 0.9, Verdict.SAME),
        (-0.011, 0.009, 0.9, Verdict.AMBIGUOUS),
        (-0.009, 0.011, 0.9, Verdict.AMBIGUOUS),
        (0.006, 0.009, 0.001, Verdict.FASTER),
    ],
)
def test_only_a_whole_interval_decides(low: float, high: float, p_value: float, said: Verdict) -> None:
    assert verdict(low, high, p_value) is said


@quick
@given(pairs, st.integers(0, 2**32))
def test_swapping_the_arms_inverts_the_speedup_and_mirrors_the_verdict(
    pairs: list[tuple[float, float]], seed: int
) -> None:
    baseline, candidate = ([pair[i] for pair in pairs] for i in (0, 1))
    there = compare(baseline, candidate, seed, resamples=80)
    back = compare(candidate, baseline, seed, resamples=80)
    assert back.verdict is MIRRORED[there.verdict]
    assert back.p_value == there.p_value
    assert back.speedup.median * there.speedup.median == pytest.approx(1)
    assert back.speedup.low * there.speedup.high == pytest.approx(1)


@quick
@given(pairs, st.floats(min_value=1.0, max_value=100.0))
def test_a_candidate_slower_by_a_factor_is_never_judged_better(pairs: list[tuple[float, float]], factor: float) -> None:
    baseline, candidate = ([pair[i] for pair in pairs] for i in (0, 1))
    now = compare(baseline, candidate, resamples=80)
    slowed = compare(baseline, [time_ms * factor for time_ms in candidate], resamples=80)
    assert slowed.speedup.median <= now.speedup.median * (1 + 1e-9)
    assert slowed.speedup.low <= now.speedup.low * (1 + 1e-9)
    assert not (slowed.verdict is Verdict.FASTER and now.verdict is Verdict.SLOWER)


@quick
@given(pairs, st.integers(0, 99))
def test_comparing_is_deterministic_and_its_interval_holds_the_median(
    pairs: list[tuple[float, float]], seed: int
) -> None:
    baseline, candidate = ([pair[i] for pair in pairs] for i in (0, 1))
    found = compare(baseline, candidate, seed, resamples=200)
    assert found == compare(baseline, candidate, seed, resamples=200)
    assert found.speedup.low <= found.speedup.median * (1 + 1e-12)
    assert found.speedup.median <= found.speedup.high * (1 + 1e-12)


@pytest.mark.parametrize(
    ("baseline", "candidate", "word"),
    [
        ([1.0, 2.0], [1.0], "pairs"),
        ([], [], "no block"),
        ([1.0], [0.0], "positive"),
        ([math.nan], [1.0], "positive"),
        ([1.0], [math.inf], "positive"),
        ([-1.0], [1.0], "positive"),
    ],
)
def test_samples_that_make_no_sense_are_refused(baseline: list[float], candidate: list[float], word: str) -> None:
    with pytest.raises(MeasureError, match=word):
        compare(baseline, candidate)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for seed in range(300):
        low, high = bootstrap_interval([rng.gauss(0, 1) for _ in range(25)], 400, seed)
        hits += low <= 0 <= high
    assert 0.90 <= hits / 300 <= 0.99


def test_wilcoxon_on_the_depression_scores_of_hollander_and_wolfe() -> None:
    """Table 3.1 of the book: nine patients before and after; T+ = 5, one-sided P = .0195."""
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    differences = [x - y for x, y in zip(before, after, strict=True)]
    assert wilcoxon_p(differences) == pytest.approx(2 * 10 / 512)


def test_exact_p_counts_every_assignment_of_signs() -> None:
    for n in range(1, 9):
        sums = [sum(rank for rank, sign in enumerate(signs, 1) if sign) for signs in product((0, 1), repeat=n)]
        middle = n * (n + 1) / 4
        for rank_sum in range(n * (n + 1) // 2 + 1):
            far = sum(abs(value - middle) >= abs(rank_sum - middle) for value in sums)
            assert exact_p(n, rank_sum) == pytest.approx(far / 2**n)


def test_wilcoxon_with_ties_by_hand() -> None:
    # |d| = 1, 1, 2, 3: ranks 1.5, 1.5, 3, 4; positive 1, 2, 3: T+ = 8.5; mean 5; variance 4*5*9/24 - 6/48 = 7.375
    z = (8.5 - 5 - 0.5) / math.sqrt(7.375)
    assert wilcoxon_p([1, -1, 2, 3]) == pytest.approx(2 * (1 - NormalDist().cdf(z)))


def test_wilcoxon_leaves_zeros_out() -> None:
    assert wilcoxon_p([0.0, 0.0]) == 1.0
    assert wilcoxon_p([0.0, 1.0, 2.0, 4.0]) == wilcoxon_p([1.0, 2.0, 4.0]) == 0.25


def test_the_normal_approximation_meets_the_exact_distribution_and_is_careful_where_it_decides() -> None:
    for rank_sum in range(25 * 26 // 2 + 1):
        exact, normal = exact_p(25, rank_sum), normal_p(25, rank_sum, ())
        assert normal == pytest.approx(exact, abs=0.01)
        assert normal >= exact or exact > 0.02


@given(st.lists(st.floats(-100, 100), max_size=60))
def test_wilcoxon_is_a_probability_and_does_not_care_about_the_sign(differences: list[float]) -> None:
    p_value = wilcoxon_p(differences)
    assert 0 < p_value <= 1
    assert wilcoxon_p([-value for value in differences]) == p_value


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 2**32))
def test_every_round_runs_every_arm_and_every_pair_of_rounds_is_balanced(rounds: int, arms: int, seed: int) -> None:
    found = order(rounds, arms, seed)
    assert found == order(rounds, arms, seed)
    assert len(found) == rounds
    assert all(sorted(round_) == list(range(arms)) for round_ in found)
    for first, second in zip(found[::2], found[1::2], strict=False):
        assert second == first[::-1]  # so each arm's positions add up to the same sum


def test_the_order_differs_between_seeds_and_lets_each_arm_begin() -> None:
    found = order(60, 3, 1)
    assert found != order(60, 3, 2)
    starts = Counter(round_[0] for round_ in found)
    assert min(starts[arm] for arm in range(3)) >= 10


def measurement(step_ms: list[float], **changes: object) -> Measurement:
    arm = Arm(name="eager", knobs={}, step_ms=tuple(step_ms), peak_bytes=1, first_step_s=0.1)
    here = Environment(device="cpu", gpu="a CPU", memory_bytes=1, torch="2", python="3", kitsune="0")
    return Measurement(arms=(arm,), steps_per_block=(5,), environment=here).model_copy(update=changes)


def test_the_digest_is_the_sha256_of_canonical_json() -> None:
    expected = '{"arms":[{"knobs":{},"name":"eager","step_ms":[1.5,2.0]}],"steps_per_block":[5]}'
    assert samples_digest([measurement([1.5, 2.0])]) == hashlib.sha256(expected.encode()).hexdigest()
    two = f"[{expected},{expected}]"
    assert samples_digest([measurement([1.5, 2.0])] * 2) == hashlib.sha256(two.encode()).hexdigest()


@given(st.lists(times_ms, min_size=1, max_size=8), st.lists(times_ms, min_size=1, max_size=8))
def test_the_digest_survives_json_and_tells_samples_apart(ours: list[float], theirs: list[float]) -> None:
    assume(ours != theirs)
    one = measurement(ours)
    other = measurement(theirs)
    assert samples_digest([Measurement.model_validate(json.loads(one.canonical_json()))]) == samples_digest([one])
    assert samples_digest([other]) != samples_digest([one])
    assert samples_digest([one, other]) != samples_digest([other, one])
    assert samples_digest([measurement(ours, notes=("a note is no sample",))]) == samples_digest([one])
