"""Statistics over several fresh processes: speedup, Student's interval, spread between processes and verdict.

Properties of a process (address layout, clocks at its start, an autotuner's choice) shift all its blocks equally. So
each process counts as one value, the median of its paired log-ratios, and the interval is Student's over these values.
Simulated false claims and coverage: `python -m benchmarks.verdicts`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles, variance
from typing import Final

from kitsune.long_proof import LongProof
from kitsune.plan import Interval
from tuner.records import Comparison, Verdict
from tuner.statistics.block_statistics import MIN_BLOCKS, bootstrap_interval, log_ratios, verdict, wilcoxon_p
from tuner.statistics.student_t import quantile, two_sided_p

PROCESSES: Final = 5
#: Fewer processes rarely decide: two that found speedups of 1.062 and 1.064 give p = 0.011.
LEAST_PROCESSES: Final = 3
ROUNDS: Final = 10
#: An earlier confirmation counts like one of five processes at most, however many were pooled in it.
MAX_PRIOR_DEGREES: Final = PROCESSES - 1
#: Maximal ratio of the found variance to the prior one. With 1 and 4 degrees of freedom it is exceeded once in 25 times
#: by chance.
PRIOR_HOLDS_UP_TO: Final = 9.0
#: Minimal standard deviation of the log speedup between processes of two runs. Processes of one run are closer, by
#: chance and because they run within a minute: four of a ResNet-50 on an H200 were 0.13 % apart, and two some minutes
#: later 0.8 %.
LEAST_DEVIATION: Final = 0.001
#: Standard deviation from which Student's interval of five processes reaches 5 % to either side and hides usual gains.
MAX_DEVIATION: Final = 0.04
#: Ratio of slowest to fastest time of a baseline, between processes or blocks, above which the times are too noisy.
FAR_APART: Final = 1.25
_NORMAL: Final = 1.96  # Student's quantile for very many degrees of freedom
_WIDEST: Final = math.log(1e6)  # limit of an interval: that of two processes that disagree may overflow a float


@dataclass(frozen=True, slots=True)
class Prior:
    """The spread between processes when an equal plan was confirmed with equal torch, driver and model.

    `deviation`: standard deviation of the log speedup between processes, with `degrees` degrees of freedom.
    `baseline`: the baseline of that speedup as text; the prior does not apply to another baseline.
    """

    deviation: float
    degrees: int
    baseline: str


@dataclass(frozen=True, slots=True)
class ConfirmationSize:
    """The size of a confirmation.

    `processes`: how many are timed; if time runs out fewer, but at least `least`, and if time is left up to `most`.
    `prior`: spread between the processes of an equal plan. `proof_s`: time for the long numerics gate; 0 if there is no
    time for it. `proof`: the result of the long gate for an equal plan, which replaces the gate.
    """

    processes: int
    least: int
    most: int
    prior: Prior | None
    proof_s: float
    proof: LongProof | None


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of the log speedup between processes, and its degrees of freedom (0: unknown)."""

    deviation: float
    degrees: int


@dataclass(frozen=True, slots=True)
class ConfirmedComparison:
    """A comparison of a candidate with a baseline over several processes.

    `prediction`: 95 % prediction interval of the speedup in one more fresh process; None with one process.
    """

    comparison: Comparison
    prediction: Interval | None
    spread: Spread
    processes: int

    @property
    def has_prior(self) -> bool:
        """Whether a prior was pooled: without one, there is one degree of freedom less than processes."""
        return self.spread.degrees >= self.processes


def confirm(
    baseline_ms: Sequence[Sequence[float]], candidate_ms: Sequence[Sequence[float]], prior: Prior | None = None
) -> ConfirmedComparison:
    """Compares a candidate with a baseline. Element p of both holds the ms per step of the blocks of process p, paired
    by round.

    The speedup is the exponential of the mean of the process values, with Student's 95 % interval and the p-value of
    the t-test against "no difference". The variance of a prior is pooled with the one found, weighted by degrees of
    freedom (as in an analysis of variance with equal variances), unless they contradict each other. If the difference
    is larger than any noise, the interval alone decides the verdict: two processes with speedups of 4.15 and 3.97 have
    an interval of 2.28 to 6.92, and p = 0.01. One process alone decides nothing; its interval is the bootstrap of its
    own blocks. The prediction assumes a spread between processes of at least the standard error of a process's median:
    in simulations with bursts of other load the prediction held 88 % of the time without that, 96 % with it.
    Raises MeasureError as `log_ratios` does.
    """
    rounds = [log_ratios(base, candidate) for base, candidate in zip(baseline_ms, candidate_ms, strict=True)]
    values = [median(ratios) for ratios in rounds]
    if len(values) == 1:
        return _of_one(rounds[0])
    middle, spread = sum(values) / len(values), pooled(values, prior)
    reach, error = quantile(spread.degrees), spread.deviation / math.sqrt(len(values))
    low, high = middle - reach * error, middle + reach * error
    ahead = reach * max(spread.deviation, _median_error(rounds)) * math.sqrt(1 + 1 / len(values))
    p_value = _p_value(middle, error, spread.degrees)
    comparison = Comparison(
        speedup=_interval(low, middle, high),
        p_value=p_value,
        verdict=verdict(low, high, 0.0 if _is_plain(rounds) else p_value),
        blocks=sum(map(len, rounds)),
    )
    return ConfirmedComparison(comparison, _interval(middle - ahead, middle, middle + ahead), spread, len(values))


def pooled(values: Sequence[float], prior: Prior | None = None) -> Spread:
    """The spread between at least two process values, pooled with a prior that does not contradict it."""
    degrees = len(values) - 1
    found = variance(values)
    before = 0.0 if prior is None else max(prior.deviation, LEAST_DEVIATION) ** 2
    if prior is None or found > PRIOR_HOLDS_UP_TO * before:
        return Spread(math.sqrt(found), degrees)
    known = min(prior.degrees, MAX_PRIOR_DEGREES)
    together = (degrees * found + known * before) / (degrees + known)
    return Spread(math.sqrt(together), degrees + known)


def has_too_large_spread(found: ConfirmedComparison) -> bool:
    """Whether the spread is so large that even five processes could not show a gain of a few per cent."""
    if found.processes > 1:
        return found.spread.deviation > MAX_DEVIATION
    speedup = found.comparison.speedup  # the standard error of one process is as much as the deviation of several
    return math.log(speedup.high / speedup.low) / (2 * _NORMAL) > MAX_DEVIATION


def is_plainly_faster(baseline_ms: Sequence[Sequence[float]], candidate_ms: Sequence[Sequence[float]]) -> bool:
    """Whether most rounds of every process show a gain above FAR_APART, which noise does not produce."""
    rounds = [log_ratios(base, candidate) for base, candidate in zip(baseline_ms, candidate_ms, strict=True)]
    return _is_plain(rounds) and all(median(ratios) > 0 for ratios in rounds)


def apart(processes_ms: Sequence[Sequence[float]]) -> float:
    """Ratio of the slowest to the fastest process median of one arm."""
    medians = [median(blocks) for blocks in processes_ms]
    return max(medians) / min(medians)


def scatter(processes_ms: Sequence[Sequence[float]]) -> float:
    """Ratio of the upper to the lower quartile of the blocks of one arm, in the process where it is largest."""
    return max(map(_quartile_ratio, processes_ms))


def _is_plain(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether most rounds of every process differ in the same direction by more than FAR_APART."""
    if any(len(ratios) < MIN_BLOCKS for ratios in rounds):
        return False
    lower, _, upper = zip(*(quantiles(ratios, n=4, method="inclusive") for ratios in rounds), strict=True)
    return bool(max(min(lower), -max(upper)) > math.log(FAR_APART))


def _median_error(rounds: Sequence[Sequence[float]]) -> float:
    """Standard error of a process's median, from the interquartile range of its rounds, assuming a normal distribution.

    The range is robust: one disturbed round in ten would widen the standard deviation threefold.
    """
    varied = [(_quartile_range(ratios) / 1.349) ** 2 / len(ratios) for ratios in rounds if len(ratios) > 1]
    return math.sqrt(math.pi / 2 * sum(varied) / len(varied)) if varied else 0.0


def _quartile_range(values: Sequence[float]) -> float:
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return upper - lower


def _quartile_ratio(blocks_ms: Sequence[float]) -> float:
    ordered = sorted(blocks_ms)
    cut = len(ordered) // 4
    return ordered[-1 - cut] / ordered[cut]


def _of_one(ratios: Sequence[float]) -> ConfirmedComparison:
    low, high = bootstrap_interval(ratios)
    comparison = Comparison(
        speedup=_interval(low, median(ratios), high),
        p_value=wilcoxon_p(ratios),
        verdict=Verdict.AMBIGUOUS,
        blocks=len(ratios),
    )
    return ConfirmedComparison(comparison, None, Spread(0.0, 0), 1)


def _p_value(middle: float, error: float, degrees: int) -> float:
    if middle == 0:
        return 1.0
    return two_sided_p(middle / error if error else math.inf, degrees)


def _interval(low: float, middle: float, high: float) -> Interval:
    low, high = max(low, min(middle, -_WIDEST)), min(high, max(middle, _WIDEST))
    return Interval(median=math.exp(middle), low=math.exp(low), high=math.exp(high))
