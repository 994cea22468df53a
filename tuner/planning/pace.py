"""What trials took so far in, what may still be begun within a budget out. Pure; seconds.

A trial's own time is without what it waited for others: to compile what it needs too, and for its turn to be timed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from tuner.measuring.compile_lock import code_of
from tuner.measuring.protocol import Inspection, Limits
from tuner.records import Spent, Trial
from tuner.search.outcomes import is_success
from tuner.search.presets import is_stock
from tuner.search.space import Configuration, Space
from tuner.statistics.block_statistics import median

#: Autotuning over compiling, on an H200: a GPT-2 171 s and 40, a ResNet-50 more than 222 s and 50. Coordinate descent:
#: a ResNet-50 345 s and 56 there, 413 s and 65 on an H100; transformers and an MLP about twice as long as compiling.
#: In five minutes of models of ordinary size it was begun six times, and ended once.
SLOW_FACTOR: Final = 5.0
#: Of what a first compilation took, what it takes with a warm cache. Llama of 125 M on an H100: 9 of 32 s; ResNet-50 on
#: an H200: 12 of 59 s.
WARM: Final = 0.3
#: What a first step takes at the least where it took that long once: tracing and planning are in no cache. On H100s
#: 4 to 20 s where the trial's own first step, after the gate had compiled, took 2 to 21.
LEAST_WARM_S: Final = 10.0
#: The same of what plain torch compiles, which plans nothing: 3 to 12 s of 22 to 72 on H100s.
WARM_STOCK: Final = 0.2
LEAST_WARM_STOCK_S: Final = 5.0
#: Processes that time the step as given too, where another stock configuration is clearly faster and gains are over
#: that one. In fp32 it is what takes most memory and time: of a nanoGPT on an H100 16 of 33 GB, and 5 of 8 s of timing.
WITH_EAGER: Final = 2
#: Times as fast as the step as given, by the low end of its interval in the search. Two processes are enough then, as
#: each of them will show a gain of more than `FAR_APART`, which no noise makes.
CLEARLY_FASTER: Final = 1.5
#: Of what is expected of a trial, what it takes at the least. Of 144 that compiled on H100s and H200s none took less
#: than 0.65 of it; of an MLP's 115, which take 4 to 40 s, five.
AT_BEST: Final = 0.6
LEAVE_S: Final = 2.0  # from the answer of a child on a GPU until the next one is timed
#: Eager steps that the long gate takes as many as, at its usual depth (tuner/numerics/depth.py).
PROOF_STEPS: Final = 700
MOST_AT_ONCE: Final = 4
CORES_A_CHILD: Final = 4  # Inductor compiles on several
CORES_FOR_A_SPARE: Final = 4  # on a CPU; with fewer it would take from what is measured
#: Peaks of the step as given that a child needs: of a Llama of 125 M on an H100 three children had 1.3 each. One more
#: where a second process compiles beside it.
STEPS_A_CHILD: Final = 1.6
ROOM: Final = 0.9  # of the GPU's memory
#: Of a candidate beside the step as given: ten rounds where steps are short. What is near the best is timed against it.
LEAST_TIMING_S: Final = 4.0
TIMED_STEPS: Final = 16  # warming up, and three rounds of two arms, each block with a step before it
MIN_CHILD_S: Final = 30.0  # importing torch and a first step take up to 15 s on a busy machine


def at_once(found: Inspection, cores: int) -> int:
    """How many children may build side by side: on a GPU what cores and memory allow, on a CPU one."""
    if found.environment.device != "cuda":
        return 1
    steps = STEPS_A_CHILD + found.random
    room = ROOM * found.environment.memory_bytes / (steps * max(1, found.peak_bytes))
    return max(1, min(beside(cores), int(room)))


def spares(device: str, cores: int) -> int:
    """How many idle children to keep that have imported torch: on a GPU as many as may be begun at once.

    With three for four trials the fourth waited 5 to 16 s for its process in 22 of 29 runs of five minutes on H100s and
    H200s, and later a process that confirms.
    """
    if device.partition(":")[0] == "cuda":
        return beside(cores)
    return int(cores >= CORES_FOR_A_SPARE)


def beside(cores: int) -> int:
    """How many children the cores of a host with a GPU are enough for."""
    return max(1, min(MOST_AT_ONCE, cores // CORES_A_CHILD))


def limits_within(left_s: float) -> Limits:
    """The limits of a child for which so many seconds are left."""
    return Limits() if left_s == math.inf else Limits(total_s=max(MIN_CHILD_S, left_s))


def warm_s(compiled_s: float, *, stock: bool = False) -> float:
    """What compiling takes with a warm cache, by what it took before."""
    part, least_s = (WARM_STOCK, LEAST_WARM_STOCK_S) if stock else (WARM, LEAST_WARM_S)
    return max(part * compiled_s, min(compiled_s, least_s))


def own_s(trial: Trial) -> float:
    return trial.took_s if trial.spent is None else trial.took_s - trial.spent.waited_s - trial.spent.queued_s


def expected_s(knobs: Configuration, trials: Iterable[Trial], space: Space, compile_s: float = 0.0) -> float:
    """What a trial of this configuration may take: where its code was compiled before, a part of what that took.

    Else the median of those that compile too; before one of these has ended, the quickest of all and `compile_s`, what
    compiling takes by a guess.
    """
    worked = list(filter(is_success, trials))
    code = code_of(knobs, randomness=True)
    same = [own_s(trial) for trial in worked if code is not None and code_of(trial.knobs, randomness=True) == code]
    if same:
        return min(warm_s(max(same)), *same)
    compiles = "compile" in knobs
    alike = [own_s(trial) for trial in worked if ("compile" in trial.knobs) == compiles]
    quickest_s = min(map(own_s, worked), default=0.0) + (compile_s if compiles else 0.0)
    return (median(alike) if alike else quickest_s) * (SLOW_FACTOR if space.is_slow(knobs) else 1.0)


def is_patient(trials: Iterable[Trial], space: Space, left_s: float) -> bool:
    """Whether so much time holds a trial that takes minutes to compile, by what trials took so far."""
    worked = list(filter(is_success, trials))
    slow_s = [own_s(trial) for trial in worked if space.is_slow(trial.knobs)]
    needed_s = max(slow_s) if slow_s else SLOW_FACTOR * max(map(own_s, worked), default=0.0)
    return left_s > needed_s


def is_in_vain(
    at_work: Iterable[tuple[Configuration, float]], trials: Iterable[Trial], space: Space, left_s: float
) -> bool:
    """Whether none of these configurations, each at work for so many seconds, can end in time.

    By what trials like it took. That is known once one that compiles has ended.
    """
    worked = list(filter(is_success, trials))
    if not any("compile" in trial.knobs for trial in worked):
        return False
    return all(AT_BEST * expected_s(knobs, worked, space) - since_s > left_s for knobs, since_s in at_work)


def eager_processes(leader: Trial, stock: Trial | None, processes: int) -> int:
    """How many of the processes that confirm the leader time the step as given."""
    if stock is None or not stock.knobs or stock.knobs == leader.knobs or stock.comparison is None:
        return processes
    return min(WITH_EAGER, processes) if stock.comparison.speedup.low >= CLEARLY_FASTER else processes


def confirmation_s(
    leader: Trial | None, stock: Trial | None, processes: int, side_by_side: int, proven_s: float = 0.0
) -> float:
    """What confirming the leader in so many processes may take, by its own trial and that of the best stock one.

    They prove no numbers, load the workload once and find compiled what they build; they build side by side, and are
    timed one by one. `proven_s`: of the long look at its numbers, which is one more process, and stands still while
    others are timed; 0 where there is none.
    """
    if leader is None:
        return 0.0
    arms = [leader, *([stock] if stock is not None and stock.knobs and stock.knobs != leader.knobs else [])]
    spent = [trial.spent or Spent(build_s=trial.took_s) for trial in arms]
    timed = len(arms) + eager_processes(leader, stock, processes) / processes  # arms a process; a trial times two
    timing_s = max(each.timing_s for each in spent) * timed / 2
    built_s = max(each.start_s + each.build_s for each in spent) + sum(map(_warm_first_step_s, arms))
    alone_s = max(
        math.ceil(processes / side_by_side) * (built_s + timing_s), built_s + processes * (timing_s + LEAVE_S)
    )
    if not proven_s:
        return alone_s
    shared_s = (processes * (built_s + timing_s) + proven_s) / side_by_side
    return max(alone_s, shared_s, proven_s + processes * timing_s)


def timing_s(step_s: float) -> float:
    """The time limit of timing a candidate beside the step as given, which takes `step_s`: enough for three rounds."""
    return max(LEAST_TIMING_S, TIMED_STEPS * step_s)


def playoff_s(contenders: Iterable[Trial]) -> float:
    """What building and timing them all in one process may take: all has been compiled."""
    found = [(trial.spent or Spent(build_s=trial.took_s), _warm_first_step_s(trial)) for trial in contenders]
    arms_s = sum(each.build_s + first_step_s + each.timing_s for each, first_step_s in found)
    return (median([each.start_s for each, _ in found]) if found else 0.0) + arms_s


def proof_s(budget_s: float, step_s: float) -> float:
    """What the long look at the winner's numbers may take, by what an eager step takes; without what compiling does."""
    return min(budget_s, PROOF_STEPS * step_s)


def elapsed_s(trials: Sequence[Trial]) -> float:
    """Seconds in which at least one of the trials was at work, by the clock of the wall."""
    spans = sorted((trial.started_at, trial.finished_at) for trial in trials)
    total_s, end = 0.0, None
    for begin, until in spans:
        first = begin if end is None or begin > end else end
        total_s += max(0.0, (until - first).total_seconds())
        end = until if end is None or until > end else end
    return total_s


def _warm_first_step_s(trial: Trial) -> float:
    first_step_s = trial.measurement.arms[-1].first_step_s if trial.measurement is not None else 0.0
    return warm_s(first_step_s, stock=is_stock(trial.knobs))
