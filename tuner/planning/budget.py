"""Suggests a time budget from the inspection of a workload, for users who give none.

The budget covers a dozen trials, which usually come within 3 % of the best, and the confirmation. A trial starts a
process, compiles, passes the numerics gate and is timed. Compile time grows with the number of operations, which is
unknown before compiling, so it is estimated from the number of parameters, which grows with depth as well. Measured on
an H200 with cold caches: MLP 8 s, ResNet-50 50 s, GPT-2 of 124 M parameters 40 s.
"""

import math
from typing import Final

from kitsune.knobs import is_compiled
from tuner.measuring.protocol import Inspection
from tuner.search.space import Space

TRIALS: Final = 12
START_S: Final = 10.0  # importing torch and a CUDA context, on a busy machine
COMPILE_S: Final = 8.0  # of the smallest model, forward and backward
COMPILE_S_A_DOUBLING: Final = 6.0  # per doubling of the parameters, from a million on
GATE_STEPS: Final = 20  # steps of the candidate in the numerics gate and the warm-up
ROUNDS: Final = 15
CONFIRMATIONS: Final = 5  # processes, each with three arms and ten rounds
CONFIRMATION_ROUNDS: Final = 10
BLOCK_S: Final = {"cuda": 0.05, "cpu": 0.02}  # the shortest block
REFERENCE: Final = 0.1  # maximal fraction of the budget for the numerics reference
#: A run is short if fewer trials than this fit by the estimate. In parallel, trials of 100 M parameters took 1.3 times
#: the estimate on H100s, and those on several streams a fifth more; then a budget of two minutes has no time left for
#: the confirmation.
SHORT: Final = 2.5
#: Below this number no trial may finish, because compiling may take several times the estimate. For a GoogLeNet of
#: 6.6 M parameters the estimate is 26 s; it took 66 to 117 s alone, and more than 111 s beside three others.
TIGHT: Final = 5.0
SHORTEST_S: Final = 60.0
LONGEST_S: Final = 3600.0
ROUNDED_S: Final = 30.0


def suggested_budget_s(inspection: Inspection, space: Space, *, at_once: int = 1) -> float:
    """The suggested budget in seconds: a multiple of half a minute, from one minute to one hour.

    `at_once`: number of candidates that are built in parallel; they are timed one after the other. Configurations that
    take minutes to compile are not included.
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
    """How many sequential trials fit into `left_s` by the estimate; compiled ones if anything can be compiled."""
    return left_s / (_built_s(inspection, space) + _timed_s(inspection))


def expected_trials(space: Space) -> int:
    """A dozen, or the size of the space if that is smaller."""
    return min(len(space.grid()), TRIALS)


def compile_s(inspection: Inspection, space: Space) -> float:
    """Estimated seconds of one compilation with cold caches; 0 where nothing can be compiled."""
    if not is_compiled(dict.fromkeys(space.searchable(), "")):
        return 0.0
    return COMPILE_S + COMPILE_S_A_DOUBLING * math.log2(1 + inspection.parameters / 1e6)


def budget_message(budget_s: float, space: Space) -> str:
    """The message for a user who gave no budget."""
    return (
        f"no budget was given: {budget_s / 60:g} min, enough for about {expected_trials(space)} trials of this step "
        "and the confirmation; --budget or --trials sets another"
    )


def _built_s(inspection: Inspection, space: Space) -> float:
    """Seconds of a trial before timing."""
    return START_S + compile_s(inspection, space) + GATE_STEPS * inspection.step_ms / 1e3


def _timed_s(inspection: Inspection) -> float:
    """Seconds of timing a candidate beside its baseline."""
    return 2 * ROUNDS * _block_s(inspection)


def _block_s(inspection: Inspection) -> float:
    return max(inspection.step_ms / 1e3, BLOCK_S[inspection.environment.device])
