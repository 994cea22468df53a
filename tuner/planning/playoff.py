"""Selects the trials whose order noise may have changed, to be measured against each other in a play-off."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tuner.records import Trial
from tuner.search.outcomes import is_success, speedup
from tuner.search.ranking import FIRST_ARM, is_captured, log_times, shared_part

#: Each contender has its own model in the memory of one process: up to FEW always, up to MANY where they are cheap.
FEW: Final = 3
MANY: Final = 8
MAX_RANKING_NOISE: Final = 0.25


def contenders_of(
    trials: Sequence[Trial], cost_s: Callable[[Sequence[Trial]], float] = len, within_s: float = 0.0
) -> list[Trial]:
    """The best trials within noise of the leader, best first: up to FEW, up to MANY if their cost fits `within_s`."""
    found = sorted(filter(is_success, trials), key=speedup, reverse=True)
    noise = ranking_noise(trials, found[0]) if found else 0.0
    close = [trial for trial in found if speedup(trial) >= speedup(found[0]) * (1 - noise)]
    counts = range(min(MANY, len(close)), FEW, -1)
    return close[: next((count for count in counts if cost_s(close[:count]) <= within_s), FEW)]


def ranking_noise(trials: Sequence[Trial], leader: Trial) -> float:
    """Relative difference that noise can cause between speedups near the leader's: the spread of the yardsticks.

    For a captured leader, the spread of a yardstick that the host launches is weighted by its part in the ranking.
    """
    share = shared_part(trials) if is_captured(leader.knobs) else 1.0
    return widest(trials, share)


def yardstick_noise(trials: Iterable[Trial]) -> float:
    """Relative difference that noise can cause between the ratios to one yardstick in two processes."""
    return widest(trials, 1.0)


def widest(trials: Iterable[Trial], share: float) -> float:
    """The widest relative spread of a yardstick's times over processes, weighted by `share` where the host launches it.

    20 % for a launch-bound MLP on an H200. Yardsticks that were timed in a single process are ignored.
    """
    logs = log_times(trials, FIRST_ARM)
    spreads = [(1.0 if is_captured(dict(key)) else share) * (max(found) - min(found)) for key, found in logs.items()]
    return min(MAX_RANKING_NOISE, max(map(math.expm1, spreads), default=0.0))
