"""Trials in, those of them that noise may have put in the wrong order out."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tuner.outcomes import is_success, speedup
from tuner.records import Trial
from tuner.space import Item
from tuner.stats import median

#: Each has a model of its own in the memory of one process: so many in any case, and more where they are cheap.
FEW: Final = 3
MANY: Final = 8
MAX_RANKING_NOISE: Final = 0.25


def contenders_of(
    trials: Sequence[Trial], cost_s: Callable[[Sequence[Trial]], float] = len, within_s: float = 0.0
) -> list[Trial]:
    """The best few trials that noise may have put in the wrong order, best first; more as far as `within_s` goes."""
    found = sorted(filter(is_success, trials), key=speedup, reverse=True)
    noise = ranking_noise(trials)
    close = [trial for trial in found if speedup(trial) >= speedup(found[0]) * (1 - noise)]
    counts = range(min(MANY, len(close)), FEW, -1)
    return close[: next((count for count in counts if cost_s(close[:count]) <= within_s), FEW)]


def ranking_noise(trials: Iterable[Trial]) -> float:
    """How far speedups of different processes may lie apart for nothing: the widest spread of one configuration's time.

    The baselines of trials are the step as given or the best by then; one that was timed in a single process says
    nothing. 20 % for a launch-bound MLP on an H200.
    """
    medians: defaultdict[frozenset[Item], list[float]] = defaultdict(list)
    for trial in trials:
        if trial.measurement is not None:
            baseline = trial.measurement.arms[0]
            medians[frozenset(baseline.knobs.items())].append(median(baseline.step_ms))
    spreads = [(max(found) - min(found)) / median(found) for found in medians.values()]
    return min(MAX_RANKING_NOISE, max(spreads, default=0.0))
