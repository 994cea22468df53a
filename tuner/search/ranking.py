"""Makes the speedups of trials comparable, although they were timed against different baselines in different processes.

A trial is timed against a yardstick: the step as given, or the best so far. Its speedup is the yardstick's speedup
times the ratio of both. Effects on the whole process, such as the GPU clock, cancel in the ratio. But steps that the
host launches vary between processes for other reasons, and steps captured as one graph hardly do: in confirmations of
BERT-base and GoogLeNet on H100s and H200s the standard deviation is 4 to 16 % for `reduce-overhead`, and 0.1 to 1.5 %
for captured steps. The ratio of the two then mostly shows how the yardstick varied: a BERT-base of 5.02 ms ranked
before one of 4.69 ms. So a captured step with a host-launched yardstick is ranked by a weighted mean, in logs, of its
ratio and its absolute time. The weight of the ratio is the part of the yardstick's variance between processes that
captured steps share, estimated from this run: the regression coefficient of control variates (Lavenberg & Welch 1981).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from kitsune.plan import Interval
from tuner.records import Arm, Trial
from tuner.search.outcomes import is_success, speedup
from tuner.search.space import Configuration, Item
from tuner.statistics.block_statistics import log_ratios

#: Prior standard deviation of a captured step between processes, with the weight of one degree of freedom. In half of
#: 49 confirmations on GPUs it was at most 0.6 %.
CAPTURED_SD: Final = 0.01

Key = frozenset[Item]
AS_GIVEN: Final[Key] = frozenset()
ALL_ARMS: Final = slice(None)
FIRST_ARM: Final = slice(1)  # the yardstick


def rankable(trials: Sequence[Trial]) -> list[Trial]:
    """The same trials with comparable speedups. `trials` must be in the order in which they ended."""
    share, as_given = shared_part(trials), log_times(trials).get(AS_GIVEN)
    ranks = {AS_GIVEN: 0.0}  # log speedup of each configuration by its first trial
    found = []
    for trial in trials:
        if trial.measurement is None or not trial.source.is_search or not is_success(trial):
            found.append(trial)
            continue
        yardstick, candidate = trial.measurement.arms[0], trial.measurement.arms[-1]
        rank = math.log(speedup(trial))
        if (beside := key_of(yardstick.knobs)) in ranks:
            rank = ranks[beside] + median(log_ratios(yardstick.step_ms, candidate.step_ms))
            if as_given and is_captured(trial.knobs) and not is_captured(yardstick.knobs):
                rank = share * rank + (1 - share) * (median(as_given) - log_ms(candidate))
        ranks.setdefault(key_of(trial.knobs), rank)
        found.append(with_speedup(trial, math.exp(rank)))
    return found


def shared_part(trials: Sequence[Trial]) -> float:
    """The part of the between-process variance of host-launched steps that captured steps share, from 0 to 1.

    1 if nothing is captured, or if no host-launched configuration was timed in two processes.
    """
    by_process = log_times(trials)
    captured = [logs for key, logs in by_process.items() if is_captured(dict(key))]
    launched = [logs for key, logs in by_process.items() if not is_captured(dict(key))]
    squares, degrees = spread(launched)
    if not captured or not squares:
        return 1.0
    known, count = spread(captured)
    shared = (CAPTURED_SD**2 + known) / (1 + count)
    return min(1.0, shared * degrees / squares)


def log_times(trials: Iterable[Trial], which: slice = ALL_ARMS) -> dict[Key, list[float]]:
    """Configuration -> log step time in each process that timed it as one of the arms in `which`."""
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for trial in trials:
        arms = () if trial.measurement is None else trial.measurement.arms[which]
        for key, arm in {key_of(arm.knobs): arm for arm in arms if arm.step_ms}.items():
            found[key].append(log_ms(arm))
    return dict(found)


def spread(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Sum of squared deviations within the groups, and its degrees of freedom."""
    squares, degrees = 0.0, 0
    for logs in groups:
        mean = sum(logs) / len(logs)
        squares += sum((log - mean) ** 2 for log in logs)
        degrees += len(logs) - 1
    return squares, degrees


def is_captured(knobs: Configuration) -> bool:
    """Whether the whole step is one graph, which the host launches in one call."""
    return knobs.get("capture") == "step"


def key_of(knobs: Configuration) -> Key:
    return frozenset(knobs.items())


def log_ms(arm: Arm) -> float:
    return math.log(median(arm.step_ms))


def with_speedup(trial: Trial, value: float) -> Trial:
    """The trial with this median speedup and a scaled interval; the trial itself if nothing changes but rounding."""
    assert trial.comparison is not None
    was = trial.comparison.speedup
    factor = value / was.median
    if math.isclose(factor, 1.0):
        return trial
    interval = Interval(median=value, low=was.low * factor, high=was.high * factor)
    return trial.model_copy(update={"comparison": trial.comparison.model_copy(update={"speedup": interval})})
