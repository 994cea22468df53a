import gc
import random
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.records import Cause, CauseKind
from tuner.timing.interleaved_rounds import (
    MAX_STEPS_PER_BLOCK,
    RoundSchedule,
    Watches,
    hopeless,
    steps_per_block,
    time_arms,
)


class FakeClock:
    """Steps are names; each takes the milliseconds that the table says, times a drift that grows with every block."""

    def __init__(self, step_ms: dict[str, float], drift: float = 0.0) -> None:
        self.step_ms = step_ms
        self.drift = drift
        self.now_ms = 0.0
        self.blocks: list[str] = []
        self.gc_was_on: list[bool] = []

    def arms(self) -> list[Callable[[], str]]:
        return [lambda name=name: name for name in self.step_ms]

    def block_ms(self, step: Callable[[], str], steps: int) -> float:
        name = step()
        self.blocks.append(name)
        self.gc_was_on.append(gc.isenabled())
        took = self.step_ms[name] * steps * (1 + self.drift * len(self.blocks))
        self.now_ms += took
        return took

    def now_s(self) -> float:
        return self.now_ms / 1e3


LOAD = Cause(kind=CauseKind.LOAD, seen="busy")


class FakeWatch:
    def __init__(self, reasons: Iterator[str | None] | None = None) -> None:
        self.reasons = reasons

    def disturbance(self) -> str | None:
        return next(self.reasons) if self.reasons is not None else None

    def notes(self) -> tuple[str, ...]:
        return ("seen",)

    def causes(self) -> tuple[Cause, ...]:
        return (LOAD,)


def schedule(**changes: object) -> RoundSchedule:
    return RoundSchedule(**{"rounds": 6, "block_ms": 50.0, "warm_s": 0.5, "seed": 1, **changes})


def never(*_: object) -> bool:
    return False


@given(
    st.lists(st.floats(0.01, 500), min_size=1, max_size=4),
    st.integers(1, 12),
    st.floats(1, 100),
    st.integers(0, 1000),
)
def test_every_arm_is_timed_in_every_round(times, rounds, block_ms, seed):
    clock = FakeClock({str(index): time for index, time in enumerate(times)})
    timing = time_arms(clock.arms(), clock, FakeWatch(), schedule(rounds=rounds, block_ms=block_ms, seed=seed), never)
    assert [len(blocks) for blocks in timing.step_ms] == [rounds] * len(times)
    for blocks, steps, time in zip(timing.step_ms, timing.steps_per_block, times, strict=True):
        assert blocks == pytest.approx([time] * rounds)
        assert steps * time >= block_ms * (1 - 1e-9)  # a block is long enough
        assert steps == 1 or (steps - 1) * time < block_ms * (1 + 1e-9)  # and no longer than it must be
    assert timing.dropped_rounds == 0


def test_the_clocks_are_warmed_first_and_the_order_changes():
    clock = FakeClock({"a": 1.0, "b": 2.0})
    time_arms(clock.arms(), clock, FakeWatch(), schedule(rounds=40, warm_s=1.0), never)
    rounds = [tuple(clock.blocks[-80:][index : index + 2]) for index in range(0, 80, 2)]
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert rounds.count(("a", "b")) == 20
    warming = clock.blocks[:-80]
    assert sum(50.0 for _ in warming) >= 900


def test_a_drifting_clock_hits_both_arms_alike():
    clock = FakeClock({"a": 1.0, "b": 1.0}, drift=0.01)
    timing = time_arms(clock.arms(), clock, FakeWatch(), schedule(rounds=40), never)
    means = [sum(blocks) / len(blocks) for blocks in timing.step_ms]
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def test_garbage_is_not_collected_within_a_round():
    clock = FakeClock({"a": 10.0})
    time_arms(clock.arms(), clock, FakeWatch(), schedule(rounds=5), never)
    assert not any(clock.gc_was_on[-5:])
    assert gc.isenabled()


def test_garbage_collection_comes_back_after_an_error():
    def boom() -> None:
        raise RuntimeError("boom")

    class Broken(FakeClock):
        def block_ms(self, step: Callable[[], str], steps: int) -> float:
            return super().block_ms(step, steps) if gc.isenabled() else boom()

    clock = Broken({"a": 10.0})
    with pytest.raises(RuntimeError, match="boom"):
        time_arms(clock.arms(), clock, FakeWatch(), schedule(), never)
    assert gc.isenabled()


def test_disturbed_rounds_are_dropped_counted_and_run_again():
    clock = FakeClock({"a": 10.0, "b": 10.0})
    reasons = ("hot" if index % 3 == 1 else None for index in count())
    timing = time_arms(clock.arms(), clock, FakeWatch(reasons), schedule(rounds=6), never)
    assert [len(blocks) for blocks in timing.step_ms] == [6, 6]
    assert timing.dropped_rounds == 3
    assert timing.notes == ("3 rounds disturbed: hot", "seen")
    assert (timing.causes, timing.disturbed) == ((LOAD,), False)


@pytest.mark.parametrize(("clean", "is_disturbed"), [(0, True), (2, True), (3, False)])
def test_on_an_always_disturbed_machine_all_rounds_are_kept_and_a_note_says_so(clean, is_disturbed):
    clock = FakeClock({"a": 10.0, "b": 10.0})
    reasons = ("hot" if index > clean else None for index in count())  # the first look is before the first round
    timing = time_arms(clock.arms(), clock, FakeWatch(reasons), schedule(rounds=30), never)
    assert timing.disturbed is is_disturbed
    assert [len(blocks) for blocks in timing.step_ms] == [60 if is_disturbed else 3] * 2
    assert timing.dropped_rounds == (0 if is_disturbed else 57)
    assert any("nothing is claimed" in note for note in timing.notes) is is_disturbed


def test_all_of_several_watches_are_used():
    looked = FakeWatch(iter(["hot", None, "cold"])), FakeWatch(iter([None, None, "low"]))
    watch = Watches(*looked)
    assert [watch.disturbance() for _ in range(3)] == ["hot", None, "cold"]
    assert list(looked[1].reasons) == [], "it was asked each time"
    assert (watch.notes(), watch.causes()) == (("seen", "seen"), (LOAD, LOAD))


def test_the_budget_ends_it_after_at_least_one_round():
    clock = FakeClock({"a": 100.0, "b": 100.0})
    timing = time_arms(clock.arms(), clock, FakeWatch(), schedule(rounds=50, budget_s=1.9), never)
    assert 1 <= len(timing.step_ms[0]) < 10
    assert any("1.9 s" in note for note in timing.notes)
    clock = FakeClock({"a": 100.0, "b": 100.0})
    timing = time_arms(clock.arms(), clock, FakeWatch(), schedule(budget_s=0.001), never)
    assert len(timing.step_ms[0]) == 1


def test_a_hopeless_arm_is_stopped_early():
    clock = FakeClock({"baseline": 10.0, "other": 7.0, "candidate": 20.0})
    asked: list[tuple[list[float], list[float]]] = []

    def cannot_win(baseline: list[float], candidate: list[float]) -> bool:
        asked.append((list(baseline), list(candidate)))
        return len(baseline) >= 3

    timing = time_arms(clock.arms(), clock, FakeWatch(), schedule(rounds=20), cannot_win)
    assert [len(blocks) for blocks in timing.step_ms] == [3, 3, 3]
    assert asked[-1] == (pytest.approx([10.0] * 3), pytest.approx([20.0] * 3))
    assert any("cannot win" in note for note in timing.notes)


@given(st.floats(0, 1e4), st.floats(0.1, 1e3))
def test_steps_per_block(step_ms, block_ms):
    steps = steps_per_block(step_ms, block_ms)
    assert 1 <= steps <= MAX_STEPS_PER_BLOCK
    assert steps == MAX_STEPS_PER_BLOCK or steps * step_ms >= block_ms * (1 - 1e-9)


def test_hopeless_needs_three_pairs_and_three_percent() -> None:
    assert not hopeless([10.0, 10.0], [20.0, 20.0], best_speedup=1.0)
    assert hopeless([10.0, 10.0, 10.0], [20.0, 20.0, 20.0], best_speedup=1.0)
    assert hopeless([10.0] * 3, [5.2] * 3, best_speedup=2.0)
    assert not hopeless([10.0] * 3, [5.1] * 3, best_speedup=2.0)
    assert not hopeless([10.0] * 4, [20.0, 20.0, 20.0, 5.0], best_speedup=2.0)
    assert not hopeless([10.0] * 3, [20.0, 20.0], best_speedup=1.0)


def test_hopeless_is_not_fooled_by_a_clock_that_slows_down() -> None:
    drift = [1.0, 1.3, 1.6, 2.0]
    assert not hopeless([10 * d for d in drift], [5 * d for d in drift], best_speedup=2.0)


def test_hopeless_saves_most_blocks_and_keeps_the_best() -> None:
    used = 0
    for seed in range(40):
        rng = random.Random(seed)
        speedups = [rng.lognormvariate(0, 0.25) for _ in range(20)]
        target = 0.0
        for true in speedups:
            baseline = [10 * rng.lognormvariate(0, 0.01) for _ in range(10)]
            candidate = [10 / true * rng.lognormvariate(0, 0.01) for _ in range(10)]
            stopped = next((n for n in range(3, 11) if target and hopeless(baseline[:n], candidate[:n], target)), None)
            assert stopped is None or true < max(speedups)
            used += stopped or 10
            target = target if stopped else max(target, true)
    assert used < 0.6 * 40 * 20 * 10
