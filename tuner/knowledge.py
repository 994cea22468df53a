"""What earlier runs tell of a step, as far as a new run needs it. Plain data; tuner/store/known.py finds it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.proof import LongProof
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

    `proven`: the plan of an earlier search of this very step, as long as this one, with an equal torch, driver and GPU;
    `prior` how far its processes lay apart, and `proof` the long look at its numbers, where these are known.
    """

    winners: Sequence[Configuration] = ()
    proven: Configuration | None = None
    prior: Prior | None = None
    proof: LongProof | None = None

    def proof_for(self, knobs: Configuration) -> LongProof | None:
        return self.proof if self.proven is not None and dict(self.proven) == dict(knobs) else None

    def prior_for(self, knobs: Configuration) -> Prior | None:
        return self.prior if self.proven is not None and dict(self.proven) == dict(knobs) else None

    def is_enough(self, leader: Trial | None, searched: Sequence[Trial]) -> bool:
        """Whether the search may end: what was proven before still leads after the first trials."""
        if self.proven is None or leader is None or dict(leader.knobs) != dict(self.proven):
            return False
        return len(list(filter(is_success, searched))) >= ENOUGH


def nothing_known(_: Inspection) -> Knowledge:
    return Knowledge()
