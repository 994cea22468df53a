import math
from collections import Counter
from itertools import chain
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import MeasureError
from tests.unit.tuner.noise import MODELS, iid, offset, process, processes
from tuner.records import Verdict
from tuner.statistics.block_statistics import MIN_BLOCKS, log_ratios
from tuner.statistics.process_statistics import (
    LEAST_DEVIATION,
    PROCESSES,
    ROUNDS,
    Prior,
    apart,
    confirm,
    has_too_large_spread,
    pooled,
    scatter,
)

RUNS = 300
MIRRORED = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.AMBIGUOUS: Verdict.AMBIGUOUS,
}
times_ms = st.floats(0.01, 1e3)
one_process = st.lists(st.tuples(times_ms, times_ms), min_size=1, max_size=12)


def allowed(share, runs=RUNS):
    """How often out of `runs` something of this share happens at most, but for one time in a thousand (binomial)."""
    return share * runs + 3.1 * math.sqrt(share * (1 - share) * runs)


@pytest.mark.parametrize("name", MODELS)
def test_claims_and_intervals_hold_under_every_noise(name):
    """The full simulation is `python -m benchmarks.verdicts`."""
    rng, noise = Random(name), MODELS[name]
    claimed, missed, surprised = Counter(), 0, 0
    for _ in range(RUNS):
        found = confirm(*processes(noise, rng, 1.0, ROUNDS, PROCESSES))
        speedup, prediction = found.comparison.speedup, found.prediction
        claimed[found.comparison.verdict] += 1
        missed += not speedup.low <= 1 <= speedup.high
        again = math.exp(median(log_ratios(*process(noise, rng, 1.0, ROUNDS))))
        surprised += not prediction.low <= again <= prediction.high
    assert claimed[Verdict.FASTER] <= allowed(0.01)
    assert claimed[Verdict.SLOWER] <= allowed(0.01)
    assert missed <= allowed(0.07)
    assert surprised <= allowed(0.10)


@pytest.mark.parametrize("name", MODELS)
def test_a_certain_gain_is_found_under_every_noise(name):
    rng = Random(name)
    found = Counter(
        confirm(*processes(MODELS[name], rng, 1.3, ROUNDS, PROCESSES)).comparison.verdict for _ in range(RUNS // 5)
    )
    assert found[Verdict.SAME] == 0
    assert found[Verdict.FASTER] >= 0.95 * RUNS / 5


@pytest.mark.parametrize(("name", "least"), [("iid 0.3 %", 0.97), ("offset by process, 0.2 %", 0.6)])
def test_a_gain_of_one_per_cent_is_found_where_processes_are_alike(name, least):
    rng = Random(name)
    found = [confirm(*processes(MODELS[name], rng, 1.01, ROUNDS, PROCESSES)).comparison.verdict for _ in range(100)]
    assert found.count(Verdict.FASTER) >= 100 * least
    assert found.count(Verdict.SAME) <= 3


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_with_what_was_known_before_claim_as_rarely(name):
    rng, noise = Random(name), MODELS[name]
    false, missed = 0, 0
    for _ in range(RUNS):
        known = confirm(*processes(noise, rng, 1.0, ROUNDS, PROCESSES)).spread
        prior = Prior(known.deviation, known.degrees, "eager")
        found = confirm(*processes(noise, rng, 1.0, ROUNDS, 2), prior).comparison
        false += found.verdict is Verdict.FASTER
        missed += not found.speedup.low <= 1 <= found.speedup.high
    assert false <= allowed(0.01)
    assert missed <= allowed(0.07)


def test_what_was_known_before_lets_two_processes_decide():
    rng = Random(1)
    base, candidate = processes(offset(0.1), rng, 1.02, ROUNDS, 2)
    assert confirm(base, candidate, Prior(0.0015, 4, "eager")).comparison.verdict is Verdict.FASTER
    assert confirm(base, candidate).comparison.verdict is Verdict.AMBIGUOUS


def test_a_prior_that_the_processes_contradict_is_left_out():
    assert pooled([0.0, 0.2], Prior(0.001, 4, "eager")) == pooled([0.0, 0.2])
    assert pooled([0.0, 0.002], Prior(0.001, 4, "eager")).degrees == 5
    assert pooled([0.0, 0.002], Prior(0.001, 40, "eager")).degrees == 5, "it counts as five processes, and no more"


def test_a_prior_of_processes_that_lay_very_close_together_says_no_more_than_others():
    assert pooled([0.0, 0.002], Prior(1e-6, 4, "eager")) == pooled([0.0, 0.002], Prior(LEAST_DEVIATION, 4, "eager"))


def test_one_process_decides_nothing():
    found = confirm(*processes(iid(0.1), Random(1), 3.0, 30, 1))
    assert found.comparison.verdict is Verdict.AMBIGUOUS
    assert found.comparison.speedup.low > 2.9
    assert (found.prediction, found.spread.degrees, found.processes) == (None, 0, 1)


def test_what_a_process_shifts_is_in_the_interval():
    """Each process is sure of itself, and they contradict each other."""
    base = [[10.0] * 10] * 4
    candidate = [[10.0] * 10, [9.5] * 10, [10.5] * 10, [9.0] * 10]
    found = confirm(base, candidate)
    assert found.comparison.verdict is Verdict.AMBIGUOUS
    assert found.comparison.speedup.low < 0.96
    assert found.prediction.low < found.comparison.speedup.low
    assert found.prediction.high > found.comparison.speedup.high


def test_processes_without_any_spread_are_certain():
    assert confirm([[10.0] * 3] * 2, [[9.0] * 3] * 2).comparison.verdict is Verdict.FASTER
    same = confirm([[10.0] * 3] * 2, [[10.0] * 3] * 2).comparison
    assert (same.verdict, same.p_value, same.speedup.is_itself) == (Verdict.SAME, 1.0, True)


@settings(max_examples=80)
@given(st.lists(one_process, min_size=1, max_size=6))
def test_swapping_the_arms_mirrors_everything(found):
    base, candidate = ([[pair[i] for pair in rounds] for rounds in found] for i in (0, 1))
    there, back = confirm(base, candidate), confirm(candidate, base)
    assert back.comparison.verdict is MIRRORED[there.comparison.verdict]
    assert back.comparison.blocks == there.comparison.blocks == len(list(chain.from_iterable(base)))
    assert back.comparison.p_value == pytest.approx(there.comparison.p_value)
    for one, other in ((there.comparison.speedup, back.comparison.speedup), (there.prediction, back.prediction)):
        if one is not None:
            assert one.low <= one.median * (1 + 1e-12)
            assert one.median <= one.high * (1 + 1e-12)
            assert other.median * one.median == pytest.approx(1)
            assert other.low * one.high == pytest.approx(1)


def test_processes_come_in_pairs_of_positive_times():
    with pytest.raises(MeasureError):
        confirm([[1.0]], [[0.0]])
    with pytest.raises(ValueError, match="shorter"):
        confirm([[1.0], [1.0]], [[1.0]])


def test_a_restless_machine():
    quiet = processes(offset(0.5), Random(1), 1.0, ROUNDS, PROCESSES)
    wild = processes(iid(30), Random(1), 1.0, ROUNDS, PROCESSES)
    assert [has_too_large_spread(confirm(*found)) for found in (quiet, wild)] == [False, True]
    alone = [([base[0]], [candidate[0]]) for base, candidate in (quiet, wild)]
    assert [has_too_large_spread(confirm(*found)) for found in alone] == [False, True]
    assert scatter(quiet[0]) < 1.02 < 1.25 < scatter(wild[0])


def test_how_far_processes_lie_apart():
    assert apart([[10, 11, 12], [110, 121, 132]]) == pytest.approx(11)
    assert apart([[10, 11, 12], [11, 11, 500]]) == 1
    assert scatter([[10] * 9 + [90], [10, 11, 20, 22, 22, 10, 11, 20]]) == pytest.approx(20 / 11)
    assert scatter([[1.0], [1.0, 3.0]]) == 3


def test_too_few_rounds_to_compare_in_one_process_are_enough_in_several():
    assert ROUNDS >= MIN_BLOCKS
    assert confirm([[10.0], [10.01], [10.0]], [[5.0], [5.0], [5.01]]).comparison.verdict is Verdict.FASTER


@pytest.mark.parametrize(("factor", "said"), [(4.0, Verdict.FASTER), (0.25, Verdict.SLOWER)])
def test_two_processes_tell_what_no_noise_explains(factor, said):
    stock = [[8.0 + 0.05 * block for block in range(ROUNDS)], [9.0 + 0.07 * block for block in range(ROUNDS)]]
    found = confirm(stock, [[ms / factor for ms in stock[0]], [ms / (1.2 * factor) for ms in stock[1]]])
    assert found.comparison.p_value > 0.01  # Student's interval of two processes tells nothing of it
    assert found.comparison.verdict is said


def test_one_process_of_two_that_finds_a_large_gain_proves_none():
    stock = [[8.0 + 0.05 * block for block in range(ROUNDS)] for _ in range(2)]
    found = confirm(stock, [[ms / 4 for ms in stock[0]], [ms / 1.2 for ms in stock[1]]])
    assert found.comparison.verdict is Verdict.AMBIGUOUS
