"""Statistics of the blocks of one process: paired comparison, bootstrap interval, signed-rank test and verdict."""

import math
import random
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Final

import numpy as np

from kitsune.base.digest import digest_of_json
from kitsune.errors import MeasureError
from kitsune.plan import Interval
from tuner.records import Comparison, Measurement, Verdict

THRESHOLD: Final = 0.005  # differences below 0.5 % are never claimed
SAME_WITHIN: Final = 0.01  # differences certainly below 1 % count as none
ALPHA: Final = 0.01
MIN_BLOCKS: Final = 6  # below this no verdict; the exact test cannot reach p < 0.01 with fewer than 8
RESAMPLES: Final = 2000
EXACT_UP_TO: Final = 25  # pairs for which the exact distribution of the signed-rank sum is used


def compare(
    baseline_ms: Sequence[float],
    candidate_ms: Sequence[float],
    seed: int = 0,
    *,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compares a candidate with a baseline, in ms per step; element i of both was timed in the same round.

    The estimate is the median of the paired log-ratios, the interval its 95 % percentile bootstrap (Efron 1979), the
    p-value a two-sided Wilcoxon signed-rank test. Swapping the arguments inverts the speedup and mirrors the verdict.
    The result holds for this process only, because processes differ; claims about the step need
    `tuner.statistics.process_statistics`.
    Raises MeasureError when the blocks are not pairs of positive finite times, or when there are none.
    """
    ratios = log_ratios(baseline_ms, candidate_ms)
    low, high = bootstrap_interval(ratios, resamples, seed)
    p_value = wilcoxon_p(ratios)
    return Comparison(
        speedup=Interval(median=math.exp(median(ratios)), low=math.exp(low), high=math.exp(high)),
        p_value=p_value,
        verdict=verdict(low, high, p_value) if len(ratios) >= MIN_BLOCKS else Verdict.AMBIGUOUS,
        blocks=len(ratios),
    )


def verdict(low: float, high: float, p_value: float) -> Verdict:
    """The verdict by the 95 % interval [low, high] of the log speedup and the p-value.

    FASTER: p < 0.01 and the whole interval above THRESHOLD. SLOWER: the mirror image. SAME: the whole interval within
    1 % of 1, for any p. AMBIGUOUS: everything else; more samples would decide. The noise of the step against itself is
    not used, because the interval contains it already.
    """
    margin, same = math.log1p(THRESHOLD), math.log1p(SAME_WITHIN)
    if p_value < ALPHA and low > margin:
        return Verdict.FASTER
    if p_value < ALPHA and high < -margin:
        return Verdict.SLOWER
    if -same <= low and high <= same:
        return Verdict.SAME
    return Verdict.AMBIGUOUS


def noise_floor(same: Comparison) -> float:
    """The largest relative difference within the interval of an A/A comparison (the baseline with itself).

    0.004 when the interval of its speedup is [0.997, 1.004]; infinite where the interval begins at 0, which excludes no
    difference. It shows users how quiet a machine is and is used in no decision.
    """
    slowest = 1.0 / same.speedup.low if same.speedup.low > 0 else math.inf
    return max(same.speedup.high, slowest, 1.0) - 1.0


def log_ratios(baseline_ms: Sequence[float], candidate_ms: Sequence[float]) -> list[float]:
    """ln(baseline / candidate) of each pair: positive where the candidate is faster.

    Raises MeasureError for unequal lengths, no blocks, or a time that is not positive and finite.
    """
    if len(baseline_ms) != len(candidate_ms):
        raise MeasureError(
            f"{len(baseline_ms)} blocks of the baseline against {len(candidate_ms)} of the candidate: "
            "blocks are compared in pairs, so both arms must be timed in every round"
        )
    if not baseline_ms:
        raise MeasureError("no block was timed, so there is nothing to compare; give the trial more time")
    for time_ms in (*baseline_ms, *candidate_ms):
        if not (math.isfinite(time_ms) and time_ms > 0):
            raise MeasureError(f"a block took {time_ms} ms per step: a time must be positive and finite")
    # A difference of logs, not the log of a quotient, so that swapping the arguments negates it exactly.
    return [math.log(slow) - math.log(fast) for slow, fast in zip(baseline_ms, candidate_ms, strict=True)]


def bootstrap_interval(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median (Efron 1979; Efron & Tibshirani 1993, §13.3).

    The same number of resampled medians is cut off at both ends, so that negated values give the negated interval.
    """
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (resamples, len(values)))
    medians = np.sort(np.median(drawn, axis=1))
    cut = resamples // 40
    return float(medians[cut]), float(medians[-1 - cut])


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the signed-rank test that the differences are symmetric around zero.

    Wilcoxon 1945, as in Hollander, Wolfe & Chicken, Nonparametric Statistical Methods (3rd ed.), §3.1: zeros are left
    out; the exact distribution up to 25 differences without ties in size, otherwise the normal approximation with
    correction for ties and for continuity.
    """
    nonzero = [value for value in differences if value != 0]
    if not nonzero:
        return 1.0
    ranks, ties = ranked([abs(value) for value in nonzero])
    rank_sum = sum(rank for rank, value in zip(ranks, nonzero, strict=True) if value > 0)
    if len(nonzero) <= EXACT_UP_TO and not ties:
        return exact_p(len(nonzero), round(rank_sum))
    return normal_p(len(nonzero), rank_sum, ties)


def ranked(sizes: Sequence[float]) -> tuple[list[float], list[int]]:
    """Rank of each size (1 = smallest, ties share their mean rank), and the length of each group of ties."""
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    ranks = [0.0] * len(sizes)
    ties = []
    start = 1
    for _, group in groupby(order, key=lambda index: sizes[index]):
        members = list(group)
        for index in members:
            ranks[index] = start + (len(members) - 1) / 2
        if len(members) > 1:
            ties.append(len(members))
        start += len(members)
    return ranks, ties


def exact_p(n: int, rank_sum: int) -> float:
    """P(a signed-rank sum at least as far from its mean as `rank_sum`), by counting all 2**n sign assignments."""
    total = n * (n + 1) // 2
    counts = [1] + [0] * total  # counts[s] = subsets of the ranks so far whose sum is s
    for rank in range(1, n + 1):
        for value in range(total, rank - 1, -1):
            counts[value] += counts[value - rank]
    tail = sum(counts[: min(rank_sum, total - rank_sum) + 1])
    return min(1.0, math.ldexp(tail, 1 - n))


def normal_p(n: int, rank_sum: float, ties: Sequence[int]) -> float:
    """The p-value by the normal approximation, for many differences or ties."""
    variance = n * (n + 1) * (2 * n + 1) / 24 - sum(size**3 - size for size in ties) / 48
    distance = abs(rank_sum - n * (n + 1) / 4) - 0.5
    return min(1.0, math.erfc(max(0.0, distance) / math.sqrt(2 * variance)))


def order(rounds: int, arms: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """The order in which the arms 0..arms-1 run in each round.

    Rounds come in pairs, a random permutation and its reverse (ABBA for two arms). Over a pair all arms have the same
    mean position, so a linear clock drift affects them equally, and no arm always follows the same other one.
    """
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    plan: list[tuple[int, ...]] = []
    while len(plan) < rounds:
        first = tuple(rng.sample(range(arms), arms))
        plan += [first, first[::-1]]
    return tuple(plan[:rounds])


def samples_digest(processes: Sequence[Measurement]) -> str:
    """SHA-256 (hex) of the canonical JSON of the raw samples: arms, choices and block times of each process.

    A single process is hashed as an object, not as a list of one, for compatibility with plans from when only one
    process was measured.
    """
    raw = [_raw(measurement) for measurement in processes]
    return digest_of_json(raw if len(raw) > 1 else raw[0])


def _raw(measurement: Measurement) -> dict[str, object]:
    arms = [{"name": arm.name, "knobs": dict(arm.knobs), "step_ms": list(arm.step_ms)} for arm in measurement.arms]
    return {"arms": arms, "steps_per_block": list(measurement.steps_per_block)}
