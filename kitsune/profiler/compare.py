"""Compares the metrics of two runs: the ratio of medians of each name, its interval and a verdict."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kitsune.errors import SettingsError
from kitsune.profiler.columns import columns, shown
from kitsune.profiler.metrics import TIMES_MS, MetricsCollector, Series
from kitsune.profiler.reporter import read_series

RESAMPLES: Final = 2000
#: n values lie all above or all below the median with probability 2^(1-n): below 5 % from 6 values on.
LEAST_VALUES: Final = 6
#: Bound on values so that the sum and the ratio of two do not overflow.
LARGEST: Final = 1e150


class Verdict(StrEnum):
    """The second run relative to the first. Only times and rates per second are called faster or slower."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    LOWER = "lower"
    HIGHER = "higher"
    TOO_FEW = "too few values"


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """The comparison of one name; `before` and `after` are medians in its unit.

    `ratio` is `before` over `after`: for times, 2.0 means twice as fast. `low` and `high` are its 95 % interval.
    """

    name: str
    unit: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of two runs by name. `incomparable`: names in both runs without a ratio, with the reason."""

    metrics: tuple[MetricComparison, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    incomparable: Mapping[str, str]

    def __str__(self) -> str:
        rows = [
            (one.name, *map(shown, (one.before, one.after)), one.unit, *_ratio(one), one.verdict.value)
            for one in self.metrics
        ]
        header = ("name", "before", "after", "unit", "ratio", "95 % interval", "verdict")
        lines = [columns(header, rows)] if rows else ["No name can be compared."]
        lines += [f"only before: {name}" for name in self.only_before]
        lines += [f"only after: {name}" for name in self.only_after]
        return "\n".join([*lines, *(f"not compared: {name}: {reason}" for name, reason in self.incomparable.items())])


def compare_runs(
    before: MetricsCollector | str | Path, after: MetricsCollector | str | Path, seed: int = 0
) -> RunComparison:
    """Compares two runs: collectors, or files of `Reporter.save_json`. The same seed gives the same intervals.

    The interval is the 95 % percentile bootstrap of the ratio of medians (Efron 1979), with the two runs resampled
    independently. It covers variation within the runs, but not differences between them, such as a warmer GPU or
    another process. Raises SettingsError for a file that `Reporter.save_json` did not write.
    """
    first, second = _series(before), _series(after)
    common = [name for name in first if name in second]
    reasons = {name: _why_not(first[name], second[name]) for name in common}
    return RunComparison(
        metrics=tuple(compared(name, first[name], second[name], seed) for name in common if not reasons[name]),
        only_before=tuple(name for name in first if name not in second),
        only_after=tuple(name for name in second if name not in first),
        incomparable={name: reason for name, reason in reasons.items() if reason},
    )


def compared(name: str, before: Series, after: Series, seed: int) -> MetricComparison:
    ratio = statistics.median(before.values) / statistics.median(after.values)
    low, high = ratio_interval(before.values, after.values, random.Random(f"{seed} {name}"))  # noqa: S311 - statistics
    fewest = min(len(before.values), len(after.values))
    return MetricComparison(
        name=name,
        unit=before.unit,
        before=statistics.median(before.values),
        after=statistics.median(after.values),
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict(low, high, before.unit) if fewest >= LEAST_VALUES else Verdict.TOO_FEW,
    )


def verdict(low: float, high: float, unit: str) -> Verdict:
    if low <= 1.0 <= high:
        return Verdict.SAME
    is_lower = low > 1.0
    if unit in TIMES_MS or unit.endswith("/s"):
        return Verdict.FASTER if is_lower == (unit in TIMES_MS) else Verdict.SLOWER
    return Verdict.LOWER if is_lower else Verdict.HIGHER


def ratio_interval(before: Sequence[float], after: Sequence[float], chance: random.Random) -> tuple[float, float]:
    """95 % percentile bootstrap interval of median(before) / median(after), all values positive."""
    first, second = sorted(before), sorted(after)
    ratios = sorted(resampled_median(first, chance) / resampled_median(second, chance) for _ in range(RESAMPLES))
    cut = RESAMPLES // 40
    return ratios[cut], ratios[-1 - cut]


def resampled_median(ordered: Sequence[float], chance: random.Random) -> float:
    """The median of a bootstrap resample of the sorted values, in constant time.

    A drawn value is ordered[floor(n * u)] for a uniform u. The k-th smallest of n uniforms is distributed as
    Beta(k, n + 1 - k), and the one before it is that times the (k - 1)-th root of a uniform (Devroye 1986, Non-Uniform
    Random Variate Generation, ch. V).
    """
    count = len(ordered)
    rank = count // 2 + 1  # of the middle value, or of the upper one of two middle values
    upper = chance.betavariate(rank, count + 1 - rank)
    middle = _at(ordered, upper)
    if count % 2:
        return middle
    lower = upper * chance.random() ** (1 / (rank - 1))
    return (_at(ordered, lower) + middle) / 2


def _at(ordered: Sequence[float], uniform: float) -> float:
    return ordered[min(int(uniform * len(ordered)), len(ordered) - 1)]


def _series(run: MetricsCollector | str | Path) -> dict[str, Series]:
    if isinstance(run, MetricsCollector):
        return run.series
    if isinstance(run, str | Path):
        return read_series(run)
    raise SettingsError(f"a run is a MetricsCollector or the path of a JSON file, not a {type(run).__name__}")


def _why_not(before: Series, after: Series) -> str:
    if before.unit != after.unit:
        return f"the unit is {before.unit!r} before and {after.unit!r} after"
    if not (before.values and after.values):
        return "there is no value"
    values = (*before.values, *after.values)
    if not all(0 < value < math.inf for value in values):
        return "a ratio needs values greater than 0"
    if not all(1 / LARGEST <= value <= LARGEST for value in values):
        return f"a ratio is taken of values between {1 / LARGEST:g} and {LARGEST:g}"
    return ""


def _ratio(one: MetricComparison) -> tuple[str, str]:
    return f"{one.ratio:.3f}", f"{one.low:.3f}-{one.high:.3f}"
