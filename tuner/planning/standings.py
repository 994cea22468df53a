"""Trials of a run in, who leads, who must be beaten and what cannot be confirmed out. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

from tuner.planning.playoff import yardstick_noise
from tuner.records import Source, Trial
from tuner.search.outcomes import best, best_stock, is_late, is_success, speedup
from tuner.search.proposal import Proposal
from tuner.search.ranking import rankable
from tuner.search.space import Space
from tuner.statistics.block_statistics import THRESHOLD

MAX_CONFIRMATIONS: Final = 3  # that fail
#: A rival whose step is hardly shorter than the one as given saves no time, and costs its own compilation.
RIVAL_FROM: Final = 1.25


def searched(trials: Sequence[Trial]) -> list[Trial]:
    """Those of the search, with speedups by which they can be ranked."""
    return [trial for trial in rankable(trials) if trial.source.is_search]


def failed_confirmations(trials: Iterable[Trial]) -> list[Trial]:
    """One for each configuration whose confirmation failed."""
    failed = [trial for trial in trials if trial.source is Source.CONFIRM and trial.failure is not None]
    return [trial for place, trial in enumerate(failed) if trial.knobs not in [each.knobs for each in failed[:place]]]


def unrefused(trials: Sequence[Trial]) -> list[Trial]:
    """What was searched, without what could not be confirmed."""
    refused = [trial.knobs for trial in failed_confirmations(trials)]
    return [trial for trial in searched(trials) if trial.knobs not in refused]


def leader(trials: Sequence[Trial]) -> Trial | None:
    """The best trial whose confirmation has not failed.

    The last try goes to the best stock configuration: it needs one arm less, and what three arms in one process
    fail of (memory, above all) hits every other candidate alike.
    """
    left = unrefused(trials)
    is_last_try = len(failed_confirmations(trials)) == MAX_CONFIRMATIONS - 1
    safest = best_stock(left) if is_last_try else None
    won = [trial.knobs for trial in trials if trial.source is Source.PLAYOFF and is_success(trial)]
    winners = [trial for trial in left if is_success(trial) and trial.knobs in won]
    return safest or best(winners) or best(left)


def stock_beside(first: Trial, trials: Sequence[Trial]) -> Trial | None:
    """The best stock configuration, over which the leader must gain.

    The step as given where that leads, by a play-off say, and no trial was sure that another one is worth a claim.
    """
    found = best_stock(unrefused(trials))
    is_sure = found is not None and found.comparison is not None and found.comparison.speedup.low > 1 + THRESHOLD
    return found if first.knobs or is_sure else first


def rival(trials: Sequence[Trial]) -> Trial | None:
    """What the next trial is timed against: the best so far, where it is much faster than the step as given."""
    first = leader(trials)
    return first if first is not None and first.knobs and speedup(first) > RIVAL_FROM else None


def to_beat(trials: Sequence[Trial], proposal: Proposal) -> float | None:
    """The speedup over the rival below which a trial may be stopped early; rivals are measured in full."""
    first = None if proposal.source in (Source.BASELINE, Source.STOCK) else leader(trials)
    if first is None:
        return None
    against = rival(trials)
    return speedup(first) / (1.0 if against is None else speedup(against)) * (1 - yardstick_noise(searched(trials)))


def is_played_off(trials: Iterable[Trial]) -> bool:
    """Whether the best few have met since the last search, in this process or in one that died afterwards.

    To play off again would be a new trial of each attempt, by which a run that kills its workers in the confirmation
    looks as if it came forward, and is never given up.
    """
    ranked = [trial.source for trial in trials if trial.source.is_search or trial.source is Source.PLAYOFF]
    return ranked[-1:] == [Source.PLAYOFF]


def is_unsearched(trials: Sequence[Trial], space: Space) -> bool:
    """Whether nothing was measured against the step as given, though there is something to try."""
    compared = [trial for trial in searched(trials) if trial.knobs and not is_late(trial)]
    return bool(space.searchable()) and not compared


def why_nothing(trials: Sequence[Trial], *, is_interrupted: bool) -> str:
    if unconfirmed := failed_confirmations(trials):
        return f"the best {len(unconfirmed)} failed when they were measured afresh; the first: {reason(unconfirmed)}"
    failed = [trial for trial in trials if trial.failure is not None]
    if failed:
        return f"all {len(failed)} trials failed; the first: {reason(failed)}"
    if is_interrupted:
        return "the search was interrupted before anything was measured"
    return "the budget ended before anything was measured; give more time"


def reason(failed: Iterable[Trial]) -> str:
    """Why the first of the failed trials failed."""
    return next(trial.failure.reason for trial in failed if trial.failure is not None)
