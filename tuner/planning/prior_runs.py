"""Results of earlier runs that a new run uses, as plain data. `tuner/tuning/recall.py` loads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.long_proof import LongProof
from tuner.measuring.protocol import Inspection
from tuner.records import Trial
from tuner.search.space import Configuration
from tuner.statistics.process_statistics import Prior

#: Processes that confirm a plan that an earlier run confirmed.
AGAIN: Final = 2


@dataclass(frozen=True, slots=True)
class Proven:
    """The result of an earlier run of the same step, with at least the same budget and an equal torch, driver and GPU.

    `first` is the trial of its plan, `stock` that of the best stock configuration. `prior` is the spread between its
    processes and `proof` the result of the long numerics gate, where known.
    """

    run_id: str
    first: Trial
    stock: Trial | None
    prior: Prior | None = None
    proof: LongProof | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`winners`: configurations of earlier plans, from the most similar step first."""

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
