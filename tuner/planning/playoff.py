"""Trials in, those of them that noise may have put in the wrong order out."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tuner.records import Trial
from tuner.search.outcomes import is_success, speedup
from tuner.search.ranking import FIRST_ARM, is_captured, log_times, shared_part

#: Each has a model of its own in the memory of one process: so many in any case, and more where they are cheap.
FEW: Final = 3
MANY: Final = 8
MAX_RANKING_NOISE: Final = 0.25


def contenders_of(
    trials: Sequence[Trial], cost_s: Callable[[Sequence[Trial]], float] = len, within_s: float = 0.0
) -> list[Trial]:
    """The best few trials that noise may have put in the wrong order, best first; more as far as `within_s` goes."""
    found = sorted(filter(is_success, trials), key=speedup, reverse=True)
    noise = ranking_noise(trials, found[0]) if found else 0.0
    close = [trial for trial in found if speedup(trial) >= speedup(found[0]) * (1 - noise)]
    counts = range(min(MANY, len(close)), FEW, -1)
    return close[: next((count for count in counts if cost_s(close[:count]) <= within_s), FEW)]


def ranking_noise(trials: Sequence[Trial], leader: Trial) -> float:
    """How far speedups near that of the leader may lie apart for nothing: the spread of the yardsticks. Of those that
    the host launches only the share counts with which they rank a captured step."""
    share = shared_part(trials) if is_captured(leader.knobs) else 1.0
    return widest(trials, share)


def yardstick_noise(trials: Iterable[Trial]) -> float:
    """How far the ratio to a yardstick in one process may lie from that in another for nothing."""
    return widest(trials, 1.0)


def widest(trials: Iterable[Trial], share: float) -> float:
    """The widest spread of a yardstick's times over processes, times `share` where the host launches it; 20 % for a
    launch-bound MLP on an H200. A yardstick that was timed in a single process says nothing."""
    logs = log_times(trials, FIRST_ARM)
    spreads = [(1.0 if is_captured(dict(key)) else share) * (max(found) - min(found)) for key, found in logs.items()]
    return min(MAX_RANKING_NOISE, max(map(math.expm1, spreads), default=0.0))
