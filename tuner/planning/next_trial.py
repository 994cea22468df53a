"""Picks the next configuration of a search that still fits into the time left."""

import math
from collections.abc import Sequence
from typing import Final

from kitsune.knobs import KNOBS, is_compiled
from tuner.planning.budget import SHORT, TIGHT
from tuner.planning.pace import expected_s, is_patient, own_s
from tuner.planning.standings import leader, searched
from tuner.records import Trial
from tuner.search.fitting import MemoryLimit
from tuner.search.outcomes import is_late
from tuner.search.presets import OPENING, TIGHT_OPENING
from tuner.search.proposal import Proposal
from tuner.search.space import Configuration, Item, Space
from tuner.search.strategy import propose

_STREAMS: Final = KNOBS["streams"]
SEVERAL_STREAMS: Final = frozenset(("streams", count) for count in _STREAMS.choices if count != _STREAMS.default)


def next_trial(
    space: Space,
    trials: Sequence[Trial],
    seed: int,
    *,
    left_s: float,
    compile_s: float,
    at_work: Sequence[tuple[Configuration, float]],
    known: Sequence[Configuration],
    trials_within: float = math.inf,
    limit: MemoryLimit | None = None,
) -> Proposal | None:
    """The next proposal, or None when there is no time for it. The step as given is always proposed.

    While the best configuration is not a compiled one, this is the first proposal that fits into the time. Later it is
    the next proposal or None, since a configuration that is not compiled no longer wins.
    `compile_s`: estimated compile time; it is raised by trials `at_work` (configuration, seconds so far) and by trials
    that timed out. `trials_within`: number of compiled trials that the whole run has time for. If it is below `TIGHT`,
    a configuration that does not compile is tried early; if it is below `SHORT`, presets use one stream until
    something beats the step as given.
    """
    tried, first = searched(trials), leader(trials)
    patient, best = is_patient(tried, space, left_s), {} if first is None else first.knobs
    late = [(trial.knobs, own_s(trial)) for trial in tried if is_late(trial)]
    longer_s = [since_s for knobs, since_s in (*at_work, *late) if is_compiled(knobs) and not space.is_slow(knobs)]
    compiling_s = max([compile_s, *longer_s])

    def fits(knobs: Configuration) -> bool:
        return not knobs or left_s > expected_s(knobs, tried, space, compiling_s)

    def may(knobs: Configuration) -> bool:
        return (patient or not space.is_slow(knobs)) and (is_compiled(best) or fits(knobs))

    presets = TIGHT_OPENING if trials_within < TIGHT else OPENING
    without = SEVERAL_STREAMS if trials_within < SHORT and not best else frozenset[Item]()
    pending = [knobs for knobs, _ in at_work]
    found = propose(
        space, tried, seed, may=may, pending=pending, known=known, presets=presets, without=without, limit=limit
    )
    return found if found is not None and fits(found.knobs) else None
