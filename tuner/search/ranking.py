"""Trials in, the same with speedups by which they can be ranked out. Pure.

A trial is timed beside a yardstick, the step as given or the best so far, and its speedup is that of the yardstick
times the ratio of both. What a process does to all times, as the clock of its GPU, is in both and cancels. But what the
host launches takes another time in each process for reasons of its own, and a step that is captured whole hardly does:
in confirmations of BERT-base and GoogLeNet on H100s and H200s `reduce-overhead` differs by 4 to 16 % (standard
deviation), captured steps by 0.1 to 1.5 %. A ratio of the two tells how the yardstick fared: a BERT-base of 5.02 ms
came before one of 4.69. So a captured step that stands beside what the host launches is ranked by the mean of its ratio
and its time, in logs. The ratio's weight is the part of the yardstick's variance between processes that captured steps
have as well, as far as this run tells: the regression of the one on the other (control variates, Lavenberg & Welch
1981).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from kitsune.plan import Interval
from tuner.records import Arm, Trial
from tuner.search.outcomes import is_success, speedup
from tuner.search.space import Configuration, Item
from tuner.statistics.block_statistics import log_ratios, median

#: How far processes of a step that is captured whole lie apart, before two of one are known; in half of 49
#: confirmations on GPUs by 0.6 % at most. It counts like one such pair.
CAPTURED_SD: Final = 0.01

Key = frozenset[Item]
AS_GIVEN: Final[Key] = frozenset()
ALL_ARMS: Final = slice(None)
FIRST_ARM: Final = slice(1)  # the yardstick


def rankable(trials: Sequence[Trial]) -> list[Trial]:
    """In their order, which is that in which they ended: what a trial was timed beside has ended before it."""
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
    """Of the variance between processes of what the host launches, the part that captured steps have too, 0 to 1.

    1 where nothing is captured, or nothing that the host launches was timed in two processes.
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
    """Of each configuration the log of its step time in every process that timed it, as one of `which` arms."""
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for trial in trials:
        arms = () if trial.measurement is None else trial.measurement.arms[which]
        for key, arm in {key_of(arm.knobs): arm for arm in arms if arm.step_ms}.items():
            found[key].append(log_ms(arm))
    return dict(found)


def spread(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Sum of squares within the groups, and its degrees of freedom."""
    squares, degrees = 0.0, 0
    for logs in groups:
        mean = sum(logs) / len(logs)
        squares += sum((log - mean) ** 2 for log in logs)
        degrees += len(logs) - 1
    return squares, degrees


def is_captured(knobs: Configuration) -> bool:
    """Whether the whole step is one graph, which the host launches at once."""
    return knobs.get("capture") == "step"


def key_of(knobs: Configuration) -> Key:
    return frozenset(knobs.items())


def log_ms(arm: Arm) -> float:
    return math.log(median(arm.step_ms))


def with_speedup(trial: Trial, value: float) -> Trial:
    """Its interval is as wide as it was. The trial itself where that is its speedup, but for rounding."""
    assert trial.comparison is not None
    was = trial.comparison.speedup
    factor = value / was.median
    if math.isclose(factor, 1.0):
        return trial
    interval = Interval(median=value, low=was.low * factor, high=was.high * factor)
    return trial.model_copy(update={"comparison": trial.comparison.model_copy(update={"speedup": interval})})
