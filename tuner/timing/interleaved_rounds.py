"""Times several arms in interleaved rounds, and drops rounds in which the machine was disturbed. Does not import
torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kitsune.device.gc_control import uncollected
from tuner.records import Cause
from tuner.statistics.block_statistics import order

Step = Callable[[], object]
CannotWin = Callable[[Sequence[float], Sequence[float]], bool]

MAX_STEPS_PER_BLOCK: Final = 10_000
MIN_CLEAN_ROUNDS: Final = 3
HOPELESS_AFTER: Final = 3  # blocks
HOPELESS_BY: Final = 1.03  # simulated with 1 % noise: saves 61 % of the blocks, stopped the best arm in 0 of 300 runs


class BlockClock(Protocol):
    """Times blocks of steps on one device."""

    def block_ms(self, step: Step, steps: int) -> float:
        """Milliseconds that `steps` calls take on the device, which has nothing else to do before and after."""
        ...

    def now_s(self) -> float: ...


class DisturbanceWatch(Protocol):
    """Detects disturbances of the machine between rounds."""

    def disturbance(self) -> str | None:
        """What disturbed the machine since the last call, or None."""
        ...

    def notes(self) -> tuple[str, ...]: ...

    def causes(self) -> tuple[Cause, ...]:
        """What was seen that can make times differ, whether or not rounds were dropped for it."""
        ...


class Watches:
    """Several watches as one."""

    def __init__(self, *watches: DisturbanceWatch) -> None:
        self._watches = watches

    def disturbance(self) -> str | None:
        reasons = [watch.disturbance() for watch in self._watches]  # ask all: each compares with its last call
        return next(filter(None, reasons), None)

    def notes(self) -> tuple[str, ...]:
        return tuple(note for watch in self._watches for note in watch.notes())

    def causes(self) -> tuple[Cause, ...]:
        return tuple(cause for watch in self._watches for cause in watch.causes())


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSchedule:
    """How much to time: `rounds` blocks of each arm, each of `block_ms` or one step, after `warm_s` of warm-up."""

    rounds: int
    block_ms: float
    warm_s: float
    budget_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """`step_ms[arm][block]`; block i of every arm ran within the same round.

    `disturbed`: disturbed rounds were kept, so no verdict may be based on these times.
    """

    step_ms: tuple[tuple[float, ...], ...]
    steps_per_block: tuple[int, ...]
    dropped_rounds: int
    notes: tuple[str, ...]
    causes: tuple[Cause, ...] = ()
    disturbed: bool = False


def hopeless(baseline_ms: Sequence[float], candidate_ms: Sequence[float], best_speedup: float) -> bool:
    """Whether a trial can be stopped early: even its fastest block is more than 3 % slower than `best_speedup` needs.

    Blocks are in ms per step, paired by round; at least 3 complete pairs are needed. `best_speedup` is relative to the
    same kind of baseline. Ratios are taken within a round, so that a drifting clock does not matter.
    """
    ratios = [candidate / baseline for baseline, candidate in zip(baseline_ms, candidate_ms, strict=False)]
    return len(ratios) >= HOPELESS_AFTER and min(ratios) * best_speedup > HOPELESS_BY


def time_arms(
    steps: Sequence[Step], clock: BlockClock, watch: DisturbanceWatch, schedule: RoundSchedule, cannot_win: CannotWin
) -> Timing:
    """Times all arms in randomised, balanced rounds (ABBA for two arms).

    A disturbed round is dropped and repeated, at most as many times as there are rounds. If fewer than
    MIN_CLEAN_ROUNDS are left, all rounds are kept and the timing is marked as disturbed. Ends early when the budget is
    spent, or when `cannot_win(baseline, candidate)` is true after a clean round.
    """
    begin_s = clock.now_s()
    counts = warm_up(steps, clock, schedule)
    watch.disturbance()  # ignore what happened before the first round
    clean: list[list[float]] = []
    disturbed: list[list[float]] = []
    reasons: dict[str, int] = {}
    notes: list[str] = []
    for turn in order(2 * schedule.rounds, len(steps), schedule.seed):
        times = one_round(turn, steps, counts, clock)
        reason = watch.disturbance()
        if reason is None:
            clean.append(times)
        else:
            disturbed.append(times)
            reasons[reason] = reasons.get(reason, 0) + 1
        if len(clean) == schedule.rounds:
            break
        if reason is None and cannot_win(*_first_and_last(clean)):
            notes.append(f"stopped after {len(clean)} rounds: it cannot win any more")
            break
        if schedule.budget_s is not None and clock.now_s() - begin_s > schedule.budget_s:
            notes.append(f"stopped after {len(clean) + len(disturbed)} rounds: {schedule.budget_s:g} s were spent")
            break
    notes += [f"{count} rounds disturbed: {reason}" for reason, count in reasons.items()]
    kept, dropped = clean, len(disturbed)
    all_kept = len(clean) < min(MIN_CLEAN_ROUNDS, schedule.rounds) and bool(disturbed)
    if all_kept:
        kept, dropped = clean + disturbed, 0
        notes.append("too few rounds were undisturbed, so all were kept, and nothing is claimed of them")
    return Timing(
        step_ms=tuple(zip(*kept, strict=True)),
        steps_per_block=counts,
        dropped_rounds=dropped,
        notes=(*notes, *watch.notes()),
        causes=watch.causes(),
        disturbed=all_kept,
    )


def warm_up(steps: Sequence[Step], clock: BlockClock, schedule: RoundSchedule) -> tuple[int, ...]:
    """Runs all arms for at least `warm_s`; returns how many steps of each arm fill a block."""
    end_s = clock.now_s() + schedule.warm_s
    counts = [1] * len(steps)
    passes = 0
    while passes < 2 or clock.now_s() < end_s:  # at least twice: the first pass only measures how long a step takes
        for arm, step in enumerate(steps):
            step_ms = clock.block_ms(step, counts[arm]) / counts[arm]
            counts[arm] = steps_per_block(step_ms, schedule.block_ms)
        passes += 1
    return tuple(counts)


def steps_per_block(step_ms: float, block_ms: float) -> int:
    """The smallest number of steps, at least one, that fills a block."""
    if step_ms <= 0 or block_ms / step_ms >= MAX_STEPS_PER_BLOCK:
        return MAX_STEPS_PER_BLOCK
    return max(1, math.ceil(block_ms / step_ms))


def one_round(turn: Sequence[int], steps: Sequence[Step], counts: Sequence[int], clock: BlockClock) -> list[float]:
    """ms per step of each arm, by arm. They run in the order of `turn`, with the garbage collector off."""
    times = [0.0] * len(steps)
    with uncollected():
        for arm in turn:
            times[arm] = clock.block_ms(steps[arm], counts[arm]) / counts[arm]
    return times


def _first_and_last(rounds: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [times[0] for times in rounds], [times[-1] for times in rounds]
