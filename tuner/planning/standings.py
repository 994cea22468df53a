"""Ranks the trials of a run: the leader, the baseline to beat, and configurations that failed their confirmation."""

from collections.abc import Iterable, Sequence
from typing import Final

from kitsune.knobs import numeric_choices
from tuner.planning.playoff import yardstick_noise
from tuner.records import FailureKind, Source, Trial
from tuner.search.outcomes import best, best_stock, is_late, is_success, is_too_large, speedup
from tuner.search.presets import is_stock
from tuner.search.proposal import Proposal
from tuner.search.ranking import rankable
from tuner.search.space import Configuration, Space
from tuner.statistics.block_statistics import THRESHOLD

#: Failures that are due to what was computed, not to how it was launched.
NUMERIC: Final = (FailureKind.WRONG, FailureKind.NOT_FINITE)
MAX_CONFIRMATIONS: Final = 3  # failed ones, before the run gives up
#: Minimal speedup of a rival: one that is hardly faster than the step as given saves no time and must be compiled.
RIVAL_FROM: Final = 1.25


def searched(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of the search, with speedups that can be ranked against each other."""
    return [trial for trial in rankable(trials) if trial.source.is_search]


def failed_confirmations(trials: Iterable[Trial]) -> list[Trial]:
    """One failed trial for each configuration whose confirmation failed."""
    failed = [trial for trial in trials if trial.source is Source.CONFIRM and trial.failure is not None]
    return [trial for place, trial in enumerate(failed) if trial.knobs not in [each.knobs for each in failed[:place]]]


def unrefused(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of the search, without configurations whose confirmation failed.

    Wrong numbers refuse every configuration that computes the same, too: those with another capture or other streams.
    Not so what plain torch does by itself, since capture or streams may have been at fault.
    """
    failed = failed_confirmations(trials)
    wrong = [numeric_choices(each.knobs) for each in failed if each.failure and each.failure.kind in NUMERIC]
    wrong = [choices for choices in wrong if choices]  # the numbers as given are right: capture or streams are not

    def is_refused(knobs: Configuration) -> bool:
        is_wrong = numeric_choices(knobs) in wrong and not is_stock(knobs)
        return is_wrong or any(each.knobs == knobs for each in failed)

    return [trial for trial in searched(trials) if not is_refused(trial.knobs)]


def leader(trials: Sequence[Trial]) -> Trial | None:
    """The best trial whose confirmation has not failed.

    The last attempt goes to the best stock configuration: it needs one arm less, and whatever makes three arms in one
    process fail (usually memory) affects every other candidate too.
    """
    left = unrefused(trials)
    is_last_try = len(failed_confirmations(trials)) == MAX_CONFIRMATIONS - 1
    safest = best_stock(left) if is_last_try else None
    won = [trial.knobs for trial in trials if trial.source is Source.PLAYOFF and is_success(trial)]
    winners = [trial for trial in left if is_success(trial) and trial.knobs in won]
    return safest or best(winners) or best(left)


def stock_beside(first: Trial, trials: Sequence[Trial]) -> Trial | None:
    """The best stock configuration, the baseline of the leader's gain.

    It is the leader itself if the step as given leads (after a play-off, for example) and no stock configuration was
    certainly faster.
    """
    found = best_stock(unrefused(trials))
    is_sure = found is not None and found.comparison is not None and found.comparison.speedup.low > 1 + THRESHOLD
    return found if first.knobs or is_sure else first


def rival(trials: Sequence[Trial]) -> Trial | None:
    """The baseline of the next trial: the best so far if it is much faster than the step as given, else None."""
    first = leader(trials)
    return first if first is not None and first.knobs and speedup(first) > RIVAL_FROM else None


def to_beat(trials: Sequence[Trial], proposal: Proposal) -> float | None:
    """The speedup over its baseline below which a trial may stop early; None for trials that are measured in full."""
    first = None if proposal.source in (Source.BASELINE, Source.STOCK) else leader(trials)
    if first is None:
        return None
    against = rival(trials)
    return speedup(first) / (1.0 if against is None else speedup(against)) * (1 - yardstick_noise(searched(trials)))


def is_played_off(trials: Iterable[Trial]) -> bool:
    """Whether a play-off has followed the last trial of the search, in this process or in one that died afterwards.

    A play-off per attempt would store a new trial each time. A run that kills its workers in the confirmation would
    then look as if it made progress, and would never be given up.
    """
    ranked = [trial.source for trial in trials if trial.source.is_search or trial.source is Source.PLAYOFF]
    return ranked[-1:] == [Source.PLAYOFF]


def is_unsearched(trials: Sequence[Trial], space: Space) -> bool:
    """Whether no candidate was measured against the step as given although there are candidates."""
    compared = [trial for trial in searched(trials) if trial.knobs and not is_late(trial)]
    return bool(space.searchable()) and not compared


def why_nothing(trials: Sequence[Trial], *, is_interrupted: bool) -> str:
    if unconfirmed := failed_confirmations(trials):
        return f"the best {len(unconfirmed)} failed when they were measured afresh; the first: {reason(unconfirmed)}"
    failed = [trial for trial in trials if trial.failure is not None]
    kinds = {trial.failure.kind for trial in failed if trial.failure is not None}
    if FailureKind.TOO_LARGE in kinds and all(map(is_too_large, failed)):
        return (
            f"of {len(failed)} configurations that were measured none fits; the first: {reason(failed)}; more time or "
            "trials try more of what saves memory"
        )
    if failed:
        return f"all {len(failed)} trials failed; the first: {reason(failed)}"
    if is_interrupted:
        return "the search was interrupted before anything was measured"
    return "the budget ended before anything was measured; give more time"


def reason(failed: Iterable[Trial]) -> str:
    """Why the first of the failed trials failed."""
    return next(trial.failure.reason for trial in failed if trial.failure is not None)
