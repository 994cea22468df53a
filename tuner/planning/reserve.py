"""Time that a search must reserve for the play-off and the confirmation, in seconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tuner.planning.pace import confirmation_s, own_s, playoff_s, proof_s, warm_s
from tuner.planning.playoff import contenders_of
from tuner.planning.prior_runs import AGAIN, Knowledge
from tuner.planning.standings import leader, unrefused
from tuner.records import Trial
from tuner.search.outcomes import best_stock, speedup
from tuner.search.space import Configuration
from tuner.statistics.process_statistics import FAR_APART, LEAST_PROCESSES, PROCESSES, ConfirmationSize

PLAYOFF_SHARE: Final = 0.15  # of the budget
PROOF_SHARE: Final = 0.2  # of the budget, for the long numerics gate of the winner
PROOF_S: Final = 60.0
#: Cost of the long numerics gate at its minimal depth, in eager steps (tuner/numerics/depth.py).
LEAST_PROOF_STEPS: Final = 150
LATE_S: Final = 2.0  # maximal delay until a search notices that it must end


@dataclass(frozen=True, slots=True)
class Reserve:
    """The reserve of a run with these trials. `budget_s` is None when the budget is a number of trials.

    `step_s`: time of the step as given. `is_random`: whether the step draws random numbers.
    """

    trials: Sequence[Trial]
    known: Knowledge
    at_once: int
    budget_s: float | None
    step_s: float
    is_random: bool = False

    def confirmation_s(self) -> float:
        """Expected time of confirming the leader.

        While the step as given leads, this is the minimum that a later winner will need; a larger reserve would keep
        that winner from being tried.
        """
        first = leader(self.trials)
        knobs: Configuration = {} if first is None else first.knobs
        processes = self.processes(knobs) if knobs else AGAIN
        confirmed_s = self._confirmed_s(first, processes)
        if first is None or not knobs or self.known.proof_for(knobs) is not None:
            return confirmed_s
        look_s = max(proof_s(self.proof_s(), self.step_s), self._reserved_look_s())
        return self._confirmed_s(first, processes, look_s + self._compiling_s(first))

    def least_s(self) -> float:
        """Minimal time of confirming the leader, with the shortest long numerics gate if that fits its share of the
        budget."""
        first = leader(self.trials)
        if first is None or not first.knobs:
            return 0.0
        least = self.least(first)
        confirmed_s = self._confirmed_s(first, least)
        look_s = self._reserved_look_s()
        is_short = look_s + warm_s(own_s(first)) > self._proof_share_s()
        if is_short or self.known.proof_for(first.knobs) is not None:
            return confirmed_s
        return self._confirmed_s(first, least, look_s + self._compiling_s(first))

    def extent(self, first: Trial, left_s: float) -> ConfirmationSize:
        """How many processes and how much of the long numerics gate fit into `left_s`."""
        knobs = first.knobs
        return ConfirmationSize(
            self.processes_within(first, left_s),
            self.least(first),
            self.processes(knobs),
            self.known.prior_for(knobs),
            self.proof_within(first, left_s),
            self.known.proof_for(knobs),
        )

    def least(self, first: Trial) -> int:
        """Minimal number of confirming processes: two where the gain exceeds noise (decision 0088)."""
        rival = best_stock(unrefused(self.trials))
        gain = speedup(first) if rival is None or rival.knobs == first.knobs else speedup(first) / speedup(rival)
        return min(AGAIN if gain > FAR_APART else LEAST_PROCESSES, self.processes(first.knobs))

    def processes_within(self, first: Trial, left_s: float) -> int:
        """Number of confirming processes that fit into `left_s`, at least `least`."""
        least = self.least(first)
        wanted = range(self.processes(first.knobs), least, -1)
        return next((count for count in wanted if self._confirmed_s(first, count) <= left_s), least)

    def proof_within(self, first: Trial, left_s: float) -> float:
        """Time for the long numerics gate of the leader beside the minimal number of processes, without compiling.

        0 where too little time is left. Two compilations are planned where they fit, else one.
        """
        least, shortest_s, longest_s = self.least(first), self._least_look_s(), self.proof_s()
        if longest_s < shortest_s:
            return 0.0
        looks = [shortest_s + (longest_s - shortest_s) * tenths / 10 for tenths in range(10, -1, -1)]
        for compiling_s in (self._compiling_s(first), warm_s(own_s(first))):
            for look_s in looks:
                if self._confirmed_s(first, least, look_s + compiling_s) <= left_s:
                    return look_s
        return 0.0

    def _least_look_s(self) -> float:
        return LEAST_PROOF_STEPS * self.step_s

    def _reserved_look_s(self) -> float:
        """The shortest long gate, plus the delay with which a search may end."""
        return self._least_look_s() + LATE_S

    def _compiling_s(self, first: Trial) -> float:
        """Compile time of the long numerics gate.

        A step with random numbers compiles twice, if the shortest gate then still fits its share of the budget.
        """
        once_s = warm_s(own_s(first))
        is_twice = self.is_random and self._reserved_look_s() + 2 * once_s <= self._proof_share_s()
        return 2 * once_s if is_twice else once_s

    def _proof_share_s(self) -> float:
        return PROOF_SHARE * (self.budget_s or math.inf)

    def _confirmed_s(self, first: Trial | None, processes: int, proven_s: float = 0.0) -> float:
        """Expected time of confirming. `proven_s`: time of the long gate with its compilation; 0 without one."""
        return confirmation_s(first, best_stock(unrefused(self.trials)), processes, self.at_once, proven_s)

    def contenders(self, left_s: float = math.inf) -> list[Trial]:
        """Trials for the play-off, best first: as many as fit into `left_s`."""
        share_s = 0.0 if self.budget_s is None else min(left_s, PLAYOFF_SHARE * self.budget_s)
        found = contenders_of(unrefused(self.trials), playoff_s, share_s)
        while len(found) > 1 and playoff_s(found) > left_s:
            found.pop()
        return found

    def playoff_s(self) -> float:
        """Expected time of the play-off; 0 where it exceeds its share of the budget and is left out."""
        contenders = self.contenders()
        longest_s = playoff_s(contenders) if len(contenders) > 1 else 0.0
        return longest_s if self.budget_s is not None and longest_s <= PLAYOFF_SHARE * self.budget_s else 0.0

    def processes(self, knobs: Configuration) -> int:
        """Number of confirming processes: one for the step as given, which needs no comparison; fewer where the spread
        between processes is known from an earlier run."""
        if not knobs:
            return 1
        return PROCESSES if self.known.prior_for(knobs) is None else AGAIN

    def proof_s(self) -> float:
        """Time limit of the long numerics gate, without compiling."""
        return min(PROOF_S, self._proof_share_s())
