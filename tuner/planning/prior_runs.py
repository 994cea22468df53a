"""What earlier runs tell of a step, as far as a new run needs it. Plain data; tuner/store/queries/known.py finds it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.long_proof import LongProof
from tuner.measuring.protocol import Inspection
from tuner.records import Trial
from tuner.search.space import Configuration
from tuner.statistics.process_statistics import Prior

#: Processes that confirm what was proven before.
AGAIN: Final = 2


@dataclass(frozen=True, slots=True)
class Proven:
    """What an earlier search of this very step came to, as long as this one, with an equal torch, driver and GPU.

    `first` is the trial of its plan, `stock` that of the best stock configuration; `prior` how far its processes lay
    apart, and `proof` the long look at its numbers, where these are known.
    """

    run_id: str
    first: Trial
    stock: Trial | None
    prior: Prior | None = None
    proof: LongProof | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`winners`: what won in earlier runs, the nearest first."""

    winners: Sequence[Configuration] = ()
    proven: Proven | None = None

    def proven_of(self, knobs: Configuration) -> Proven | None:
        return self.proven if self.proven is not None and dict(self.proven.first.knobs) == dict(knobs) else None

    def proof_for(self, knobs: Configuration) -> LongProof | None:
        proven = self.proven_of(knobs)
        return None if proven is None else proven.proof

    def prior_for(self, knobs: Configuration) -> Prior | None:
        proven = self.proven_of(knobs)
        return None if proven is None else proven.prior


def nothing_known(_inspection: Inspection, _budget_s: float | None) -> Knowledge:
    return Knowledge()
