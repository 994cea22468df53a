"""A first look at a workload in, the budget that a search of it needs out: for a user who names none.

A dozen trials, which come within 3 % of the best as a rule, and the confirmation. What a trial takes is starting a
process, compiling, the numerics gate and timing. Compiling grows with the number of operations, which nobody knows
before it; the number of parameters is what is known, and grows with it as far as depth does. Measured on an H200 with
cold caches: MLP 8 s, ResNet-50 50 s, GPT-2 of 124 M parameters 40 s.
"""

import math
from itertools import islice
from typing import Final

from tuner.measuring.protocol import Inspection
from tuner.search.space import Space

TRIALS: Final = 12
START_S: Final = 10.0  # importing torch and a CUDA context, on a busy machine
COMPILE_S: Final = 8.0  # of the smallest model, forward and backward
COMPILE_S_A_DOUBLING: Final = 6.0  # of the parameters, from a million on
GATE_STEPS: Final = 20  # of the candidate, and warming up
ROUNDS: Final = 15
CONFIRMATIONS: Final = 5  # processes, each of three arms and ten rounds
CONFIRMATION_ROUNDS: Final = 10
BLOCK_S: Final = {"cuda": 0.05, "cpu": 0.02}  # the shortest block
REFERENCE: Final = 0.1  # of the budget, at most, goes to the reference of the numerics
#: Trials by the guess. Side by side, trials of 100 M parameters took 1.3 times the guess on H100s, and those on several
#: streams a fifth more; then there is the confirmation. Of two minutes nothing is left for that.
SHORT: Final = 2.5
#: The same for a run in which none may end, since compiling takes several times the guess: 26 s of a GoogLeNet of 6.6 M
#: parameters, which took 66 to 117 s alone, and more than 111 with three others.
TIGHT: Final = 5.0
SHORTEST_S: Final = 60.0
LONGEST_S: Final = 3600.0
ROUNDED_S: Final = 30.0


def suggested_budget_s(inspection: Inspection, space: Space, *, at_once: int = 1) -> float:
    """Seconds that a search of this workload should have, in half minutes, from one minute to an hour.

    `at_once`: how many candidates are built at the same time; timing is one after the other. What takes minutes to
    compile is not in it.
    """
    step_s = inspection.step_ms / 1e3
    block_s = _block_s(inspection)
    trials = expected_trials(space)
    built_s, timed_s = _built_s(inspection, space), _timed_s(inspection)
    search_s = trials * max(built_s / at_once, timed_s) + min(built_s, timed_s)
    confirmed_s = CONFIRMATIONS * (START_S + GATE_STEPS * step_s + 3 * CONFIRMATION_ROUNDS * block_s)
    whole_s = (START_S + search_s + confirmed_s) / (1 - REFERENCE)
    return min(LONGEST_S, max(SHORTEST_S, ROUNDED_S * math.ceil(whole_s / ROUNDED_S)))


def trials_within(left_s: float, inspection: Inspection, space: Space) -> float:
    """How many trials, one after the other, so much time holds by the guess: that compile, where something does."""
    return left_s / (_built_s(inspection, space) + _timed_s(inspection))


def expected_trials(space: Space) -> int:
    """A dozen, or all there are."""
    return sum(1 for _ in islice(space.configurations(), TRIALS))


def compile_s(inspection: Inspection, space: Space) -> float:
    """What compiling takes once with cold caches; 0 where nothing can be compiled."""
    if "compile" not in space.searchable():
        return 0.0
    return COMPILE_S + COMPILE_S_A_DOUBLING * math.log2(1 + inspection.parameters / 1e6)


def told(budget_s: float, space: Space) -> str:
    """The sentence for a user who named no budget."""
    return (
        f"no budget was given: {budget_s / 60:g} min, enough for about {expected_trials(space)} trials of this step "
        "and the confirmation; --budget or --trials sets another"
    )


def _built_s(inspection: Inspection, space: Space) -> float:
    """What a trial takes until it is timed."""
    return START_S + compile_s(inspection, space) + GATE_STEPS * inspection.step_ms / 1e3


def _timed_s(inspection: Inspection) -> float:
    """What timing it beside its baseline takes."""
    return 2 * ROUNDS * _block_s(inspection)


def _block_s(inspection: Inspection) -> float:
    return max(inspection.step_ms / 1e3, BLOCK_S[inspection.environment.device])
