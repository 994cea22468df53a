"""Trials in, those of them that noise may have put in the wrong order out."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tuner.records import Trial
from tuner.search import is_success, speedup
from tuner.space import Item
from tuner.stats import median

MAX_CONTENDERS = 3  # each has a model of its own in the memory of one process
MAX_RANKING_NOISE = 0.25


def contenders_of(trials: Sequence[Trial]) -> list[Trial]:
    """The best few trials that noise may have put in the wrong order, best first."""
    found = sorted(filter(is_success, trials), key=speedup, reverse=True)
    noise = ranking_noise(trials)
    return [trial for trial in found if speedup(trial) >= speedup(found[0]) * (1 - noise)][:MAX_CONTENDERS]


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
