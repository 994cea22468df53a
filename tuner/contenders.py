"""Trials in, those of them that noise may have put in the wrong order out."""

from collections.abc import Iterable, Sequence

from tuner.records import Trial
from tuner.search import is_success, speedup
from tuner.stats import median

MAX_CONTENDERS = 3  # each has a model of its own in the memory of one process
MAX_RANKING_NOISE = 0.25


def contenders_of(trials: Sequence[Trial]) -> list[Trial]:
    """The best few trials that noise may have put in the wrong order, best first."""
    found = sorted(filter(is_success, trials), key=speedup, reverse=True)
    noise = ranking_noise(trials)
    return [trial for trial in found if speedup(trial) >= speedup(found[0]) * (1 - noise)][:MAX_CONTENDERS]


def ranking_noise(trials: Iterable[Trial]) -> float:
    """How far speedups of different processes may lie apart for nothing: the spread of the baseline they are over.

    20 % for a launch-bound MLP on an H200.
    """
    medians = [median(trial.measurement.arms[0].step_ms) for trial in trials if trial.measurement is not None]
    return min(MAX_RANKING_NOISE, (max(medians) - min(medians)) / median(medians)) if medians else 0.0
