"""Estimates how long trials, confirmations and play-offs take, from the trials so far. All times in seconds.

A trial's own time excludes waiting: for another process to compile the same code, and for its turn to be timed.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from kitsune.knobs import is_compiled
from tuner.measuring.compile_lock import code_of
from tuner.measuring.protocol import Inspection, Limits
from tuner.records import Spent, Trial
from tuner.search.outcomes import is_success
from tuner.search.presets import is_stock
from tuner.search.space import Configuration, Space

#: Time of autotuning relative to plain compiling. Autotuning on an H200: 171 s against 40 s for a GPT-2, more than
#: 222 s against 50 s for a ResNet-50. Coordinate descent: 345 s against 56 s for a ResNet-50 there, 413 s against 65 s
#: on an H100; about twice the compile time for transformers and an MLP. In runs of five minutes on models of ordinary
#: size it was begun six times and ended once.
SLOW_FACTOR: Final = 5.0
#: Compile time with a warm cache, as a fraction of the first compilation. Llama of 125 M on an H100: 9 of 32 s;
#: ResNet-50 on an H200: 12 of 59 s.
WARM: Final = 0.3
#: Minimum of a first step with a warm cache, if the cold one took that long: tracing and planning are not cached.
#: On H100s 4 to 20 s where the trial's own first step, after the gate had compiled, took 2 to 21 s.
LEAST_WARM_S: Final = 10.0
#: The same for stock configurations of torch, which plan nothing: 3 to 12 s of 22 to 72 s on H100s.
WARM_STOCK: Final = 0.2
LEAST_WARM_STOCK_S: Final = 5.0
#: Number of confirming processes that also time the step as given, where another stock configuration is clearly faster
#: and is the baseline of the gain. In fp32 the step as given takes most memory and time: for a nanoGPT on an H100
#: 16 of 33 GB, and 5 of 8 s of timing.
WITH_EAGER: Final = 2
#: Speedup over the step as given (low end of the interval in the search) from which a configuration is clearly faster.
#: Two processes are enough then: each will show a gain above `FAR_APART`, which noise does not produce.
CLEARLY_FASTER: Final = 1.5
#: Minimum of a trial's time as a fraction of its expected time. Of 144 trials that compiled on H100s and H200s none
#: took less than 0.65; of 115 trials of an MLP, which take 4 to 40 s, five did.
AT_BEST: Final = 0.6
LEAVE_S: Final = 2.0  # from the answer of a child on a GPU until the next one is timed
#: Cost of the long numerics gate at its usual depth, in eager steps (tuner/numerics/depth.py).
PROOF_STEPS: Final = 700
MOST_AT_ONCE: Final = 4
CORES_A_CHILD: Final = 4  # Inductor compiles in several processes
CORES_FOR_A_SPARE: Final = 4  # on a CPU; with fewer cores an idle child would slow down the measurement
#: Memory of a child in peaks of the step as given: three children of a Llama of 125 M on an H100 had 1.3 each. One more
#: where a second process compiles beside it.
STEPS_A_CHILD: Final = 1.6
USABLE_MEMORY: Final = 0.9  # usable fraction of the GPU's memory
#: Minimal time limit for timing a candidate against the step as given: ten rounds of short steps. Candidates near the
#: best are timed against the best.
LEAST_TIMING_S: Final = 4.0
TIMED_STEPS: Final = 16  # warm-up, and three rounds of two arms, with one step before each block
MIN_CHILD_S: Final = 30.0  # importing torch and a first step take up to 15 s on a busy machine


def at_once(found: Inspection, cores: int) -> int:
    """How many children may build in parallel: limited by cores and memory on a GPU, one on a CPU."""
    if found.environment.device != "cuda":
        return 1
    steps = STEPS_A_CHILD + found.random
    fitting = USABLE_MEMORY * found.environment.memory_bytes / (steps * max(1, found.peak_bytes))
    return max(1, min(beside(cores), int(fitting)))


def spares(device: str, cores: int) -> int:
    """How many idle children that have imported torch to keep: on a GPU as many as may start at once.

    With three spares for four trials, the fourth trial waited 5 to 16 s for its process in 22 of 29 runs of five
    minutes on H100s and H200s, and later a confirming process waited too.
    """
    if device.partition(":")[0] == "cuda":
        return beside(cores)
    return int(cores >= CORES_FOR_A_SPARE)


def beside(cores: int) -> int:
    """How many children the cores of a GPU host can serve."""
    return max(1, min(MOST_AT_ONCE, cores // CORES_A_CHILD))


def limits_within(left_s: float) -> Limits:
    """The time limits of a child when `left_s` seconds of the budget are left."""
    return Limits() if left_s == math.inf else Limits(total_s=max(MIN_CHILD_S, left_s))


def warm_s(compiled_s: float, *, stock: bool = False) -> float:
    """Estimated compile time with a warm cache, from the time with a cold one."""
    part, least_s = (WARM_STOCK, LEAST_WARM_STOCK_S) if stock else (WARM, LEAST_WARM_S)
    return max(part * compiled_s, min(compiled_s, least_s))


def own_s(trial: Trial) -> float:
    return trial.took_s if trial.spent is None else trial.took_s - trial.spent.waited_s - trial.spent.queued_s


def expected_s(knobs: Configuration, trials: Iterable[Trial], space: Space, compile_s: float = 0.0) -> float:
    """Expected time of a trial of this configuration.

    If its code was compiled before, that is a fraction of that trial's time. Otherwise it is the median of the trials
    that compile too, or of those that do not. Before one of them has ended, it is the quickest trial plus `compile_s`,
    the estimated compile time.
    """
    worked = list(filter(is_success, trials))
    code = code_of(knobs, randomness=True)
    same = [own_s(trial) for trial in worked if code is not None and code_of(trial.knobs, randomness=True) == code]
    if same:
        return min(warm_s(max(same)), *same)
    compiles = is_compiled(knobs)
    alike = [own_s(trial) for trial in worked if is_compiled(trial.knobs) == compiles]
    quickest_s = min(map(own_s, worked), default=0.0) + (compile_s if compiles else 0.0)
    return (median(alike) if alike else quickest_s) * (SLOW_FACTOR if space.is_slow(knobs) else 1.0)


def recording_s(knobs: Configuration, trials: Iterable[Trial]) -> float:
    """Expected time to record the launches of a step of this configuration in a process of its own.

    That of its quickest trial, which starts, loads, compiles and runs steps too; of the quickest of all without one.
    """
    worked = list(filter(is_success, trials))
    same = [own_s(trial) for trial in worked if trial.knobs == knobs]
    return min(same or map(own_s, worked), default=0.0)


def is_patient(trials: Iterable[Trial], space: Space, left_s: float) -> bool:
    """Whether `left_s` is enough for a trial that takes minutes to compile, judged by the trials so far."""
    worked = list(filter(is_success, trials))
    slow_s = [own_s(trial) for trial in worked if space.is_slow(trial.knobs)]
    needed_s = max(slow_s) if slow_s else SLOW_FACTOR * max(map(own_s, worked), default=0.0)
    return left_s > needed_s


def is_in_vain(
    at_work: Iterable[tuple[Configuration, float]], trials: Iterable[Trial], space: Space, left_s: float
) -> bool:
    """Whether none of the running trials (configuration, seconds so far) can end within `left_s`.

    Judged by the times of similar trials, so False until a trial that compiles has ended.
    """
    worked = list(filter(is_success, trials))
    if not any(is_compiled(trial.knobs) for trial in worked):
        return False
    return all(AT_BEST * expected_s(knobs, worked, space) - since_s > left_s for knobs, since_s in at_work)


def eager_processes(leader: Trial, stock: Trial | None, processes: int) -> int:
    """How many of the confirming processes time the step as given."""
    if stock is None or not stock.knobs or stock.knobs == leader.knobs or stock.comparison is None:
        return processes
    return min(WITH_EAGER, processes) if stock.comparison.speedup.low >= CLEARLY_FASTER else processes


def confirmation_s(
    leader: Trial | None, stock: Trial | None, processes: int, side_by_side: int, proven_s: float = 0.0
) -> float:
    """Expected time of confirming the leader in `processes` processes, from its trial and the best stock trial.

    These processes check no numerics, load the workload once and find their code compiled. They build in parallel and
    are timed one by one. `proven_s`: time of the long numerics gate, which runs in one more process and pauses while
    others are timed; 0 without one.
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
    """Time limit for timing a candidate against the step as given, which takes `step_s`: enough for three rounds."""
    return max(LEAST_TIMING_S, TIMED_STEPS * step_s)


def playoff_s(contenders: Iterable[Trial]) -> float:
    """Expected time of building and timing all contenders in one process, with warm compile caches."""
    found = [(trial.spent or Spent(build_s=trial.took_s), _warm_first_step_s(trial)) for trial in contenders]
    arms_s = sum(each.build_s + first_step_s + each.timing_s for each, first_step_s in found)
    return (median([each.start_s for each, _ in found]) if found else 0.0) + arms_s


def proof_s(budget_s: float, step_s: float) -> float:
    """Time limit of the long numerics gate without compiling; `step_s` is the time of an eager step."""
    return min(budget_s, PROOF_STEPS * step_s)


def elapsed_s(trials: Sequence[Trial]) -> float:
    """Wall-clock seconds during which at least one of the trials was running."""
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
