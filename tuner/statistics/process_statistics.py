"""Block times of several fresh processes in; speedup, intervals and verdict, with the spread between them, out. Pure.

What sits in a process (address layout, clocks at its start, an autotuner's choice) shifts all its blocks alike. So a
process is one value, the median of its paired log-ratios, and the interval is Student's over these values.
Simulated false claims and coverage: `python -m benchmarks.verdicts`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles, variance
from typing import Final

from kitsune.long_proof import LongProof
from kitsune.plan import Interval
from tuner.records import Comparison, Verdict
from tuner.statistics.block_statistics import MIN_BLOCKS, bootstrap_interval, log_ratios, median, verdict, wilcoxon_p
from tuner.statistics.student_t import quantile, two_sided_p

PROCESSES: Final = 5
#: Fewer prove little: two that found 1.062 and 1.064 times leave p = 0.011.
LEAST_PROCESSES: Final = 3
ROUNDS: Final = 10
#: An earlier proof counts as much as a confirmation of five processes, however many were pooled in it.
MAX_PRIOR_DEGREES: Final = PROCESSES - 1
#: Variances of 1 and 4 degrees of freedom lie further apart once in 25 times when nothing has changed.
PRIOR_HOLDS_UP_TO: Final = 9.0
#: Of the log speedup, between processes of two runs. Those of one run lie closer, by chance and since they are of one
#: minute: of a ResNet-50 on an H200 four lay 0.13 % apart, and two some minutes later 0.8 %.
LEAST_DEVIATION: Final = 0.001
#: Student's interval of such five processes reaches 5 % to either side: no ordinary gain shows in it.
RESTLESS: Final = 0.04
#: The times of a baseline, between processes or from block to block: slowest over fastest.
FAR_APART: Final = 1.25
_NORMAL: Final = 1.96  # Student's quantile of very many degrees of freedom
_WIDEST: Final = math.log(1e6)  # two processes that disagree leave an interval that no float holds


@dataclass(frozen=True, slots=True)
class Prior:
    """How far processes lay apart when an equal plan was proven with an equal torch, driver and model.

    `deviation`: standard deviation of the log speedup between processes, with so many `degrees` of freedom.
    `baseline`: the configuration in words that the speedup was over; of another one it says nothing.
    """

    deviation: float
    degrees: int
    baseline: str


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is done to confirm a candidate.

    `processes` are timed: fewer where time ends, though not less than `least`, and up to `most` where it is enough for
    another one, by what those took that have ended. `prior`: how far those of an equal plan lay apart. `proof_s`: what
    the long look at the numbers may take; 0 where there is no time for one. None is taken where `proof` is one of an
    equal plan.
    """

    processes: int
    least: int
    most: int
    prior: Prior | None
    proof_s: float
    proof: LongProof | None


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of the log speedup between processes, and its degrees of freedom: 0 when it is not known."""

    deviation: float
    degrees: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A candidate against a baseline in several processes.

    `prediction`: measured in one more fresh process, the speedup lies in it 95 % of the time; None of one process.
    """

    comparison: Comparison
    prediction: Interval | None
    spread: Spread
    processes: int

    @property
    def has_prior(self) -> bool:
        """Whether the spread of an earlier proof is in it: without, there is one degree of freedom less than values."""
        return self.spread.degrees >= self.processes


def confirm(
    baseline_ms: Sequence[Sequence[float]], candidate_ms: Sequence[Sequence[float]], prior: Prior | None = None
) -> Confirmed:
    """Element p of both holds the ms per step of the blocks of process p, paired by round.

    The speedup is the exponential of the mean of the process values, its interval Student's (95 %), the p-value that of
    the t-test against "no difference". With a prior its variance is pooled with the one found, weighted by degrees of
    freedom (as in an analysis of variance with equal variances), unless the two contradict each other. A difference
    larger than any that noise makes takes the interval alone: two processes that find 4.15 and 3.97 times have one of
    2.28 to 6.92, and p = 0.01. One process alone decides nothing: its interval is the bootstrap of its own blocks. The
    prediction takes processes to lie at least as far apart as the scatter of their own rounds makes the median of a few
    of them: simulated with bursts of other load it came true 88 % of the time without that, 96 % with it. Raises
    MeasureError as `log_ratios` does.
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
    return Confirmed(comparison, _interval(middle - ahead, middle, middle + ahead), spread, len(values))


def pooled(values: Sequence[float], prior: Prior | None = None) -> Spread:
    """How far the values of at least two processes lie apart, by them and by what was known before."""
    degrees = len(values) - 1
    found = variance(values)
    before = 0.0 if prior is None else max(prior.deviation, LEAST_DEVIATION) ** 2
    if prior is None or found > PRIOR_HOLDS_UP_TO * before:
        return Spread(math.sqrt(found), degrees)
    known = min(prior.degrees, MAX_PRIOR_DEGREES)
    together = (degrees * found + known * before) / (degrees + known)
    return Spread(math.sqrt(together), degrees + known)


def is_restless(found: Confirmed) -> bool:
    """Whether not even five such processes could show a gain of some per cent."""
    if found.processes > 1:
        return found.spread.deviation > RESTLESS
    speedup = found.comparison.speedup  # the standard error of one process is as much as the deviation of several
    return math.log(speedup.high / speedup.low) / (2 * _NORMAL) > RESTLESS


def is_plainly_faster(baseline_ms: Sequence[Sequence[float]], candidate_ms: Sequence[Sequence[float]]) -> bool:
    """Whether most rounds of every process say so, by more than times of one baseline ever differ."""
    rounds = [log_ratios(base, candidate) for base, candidate in zip(baseline_ms, candidate_ms, strict=True)]
    return _is_plain(rounds) and all(median(ratios) > 0 for ratios in rounds)


def apart(processes_ms: Sequence[Sequence[float]]) -> float:
    """Slowest over fastest median of the processes that timed one step."""
    medians = [median(blocks) for blocks in processes_ms]
    return max(medians) / min(medians)


def scatter(processes_ms: Sequence[Sequence[float]]) -> float:
    """Upper over lower quartile of the blocks of one step, in the process where they lie furthest apart."""
    return max(map(_quartile_ratio, processes_ms))


def _is_plain(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether most rounds of every process differ, in one direction, by more than times of one baseline ever do."""
    if any(len(ratios) < MIN_BLOCKS for ratios in rounds):
        return False
    lower, _, upper = zip(*(quantiles(ratios, n=4, method="inclusive") for ratios in rounds), strict=True)
    return bool(max(min(lower), -max(upper)) > math.log(FAR_APART))


def _median_error(rounds: Sequence[Sequence[float]]) -> float:
    """Standard error of the median of one process's rounds by their interquartile range, as if they were normal.

    The range and not the deviation, which one round in ten that something disturbed would widen threefold.
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


def _of_one(ratios: Sequence[float]) -> Confirmed:
    low, high = bootstrap_interval(ratios)
    comparison = Comparison(
        speedup=_interval(low, median(ratios), high),
        p_value=wilcoxon_p(ratios),
        verdict=Verdict.AMBIGUOUS,
        blocks=len(ratios),
    )
    return Confirmed(comparison, None, Spread(0.0, 0), 1)


def _p_value(middle: float, error: float, degrees: int) -> float:
    if middle == 0:
        return 1.0
    return two_sided_p(middle / error if error else math.inf, degrees)


def _interval(low: float, middle: float, high: float) -> Interval:
    low, high = max(low, min(middle, -_WIDEST)), min(high, max(middle, _WIDEST))
    return Interval(median=math.exp(middle), low=math.exp(low), high=math.exp(high))
