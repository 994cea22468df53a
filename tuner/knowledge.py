"""What earlier runs tell of a step, as far as a new run needs it. Plain data; tuner/store/known.py finds it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tuner.confirmation import Prior
from tuner.protocol import Inspection
from tuner.records import Trial
from tuner.search import is_success
from tuner.space import Configuration

#: Processes that confirm what was proven before.
AGAIN: Final = 2
#: Trials after which what was proven before and still leads is not searched for again.
ENOUGH: Final = 3


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`winners`: what won in earlier runs, the nearest first.

    `proven`: the plan of an earlier, whole search of this very step with an equal torch, driver and model of GPU, and
    `prior` how far its processes lay apart, where that is known.
    """

    winners: Sequence[Configuration] = ()
    proven: Configuration | None = None
    prior: Prior | None = None

    def prior_for(self, knobs: Configuration) -> Prior | None:
        return self.prior if self.proven is not None and dict(self.proven) == dict(knobs) else None

    def is_enough(self, leader: Trial | None, searched: Sequence[Trial]) -> bool:
        """Whether the search may end: what was proven before still leads after the first trials."""
        if self.proven is None or leader is None or dict(leader.knobs) != dict(self.proven):
            return False
        return len(list(filter(is_success, searched))) >= ENOUGH


def nothing_known(_: Inspection) -> Knowledge:
    return Knowledge()
