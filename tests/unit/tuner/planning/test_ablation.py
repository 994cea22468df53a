import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.knobs import KNOBS, Choice
from tests.unit.tuner.machine import ENVIRONMENT, NOON, failure, only
from tuner.measuring.protocol import ArmSpec, Job
from tuner.planning.ablation import (
    MOST_LEFT_OUT,
    TOO_FEW,
    UNREACHED,
    WITHOUT,
    Ablation,
    ablation_of,
    arms_without,
    chunks,
    companions,
    contributions,
    in_order,
    next_chunk,
    progress_of,
    reasons_of,
    refusals,
    without,
)
from tuner.records import Arm, Failure, FailureKind, Measurement, Source, Trial
from tuner.search.space import Space
from tuner.statistics.block_statistics import MIN_BLOCKS, bootstrap_interval
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, STOCK, confirmation_arms

Knobs = Mapping[str, Choice]
StepMs = Callable[[Knobs], float]

EVERYTHING = Space.of()
#: Any of these may be left out of any others.
FREE: dict[str, Choice] = {
    "layout": "channels_last",
    "precision": "bf16",
    "attention": "flash",
    "compile": "default",
    "update": "fused",
    "capture": "step",
}
PLAN: dict[str, Choice] = {"precision": "bf16", "compile": "default", "update": "fused", "capture": "step"}
#: The graph cannot go while the streams stay.
STREAMED: dict[str, Choice] = {"precision": "bf16", "capture": "step", "streams": 4}

plans = st.sets(st.sampled_from(sorted(FREE)), min_size=2).map(lambda names: {name: FREE[name] for name in names})
all_plans = st.fixed_dictionaries({name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()}).map(
    EVERYTHING.repair
)


def measured(
    arms: Sequence[ArmSpec], step_ms: StepMs, blocks: int = 10, pace: Callable[[int], float] = lambda _: 1.0
) -> Measurement:
    """`pace` is how many times as long every step of a round takes."""
    return Measurement(
        arms=tuple(
            Arm(
                name=arm.name,
                knobs=arm.knobs,
                step_ms=tuple(step_ms(arm.knobs) * pace(block) for block in range(blocks)),
                peak_bytes=0,
                first_step_s=0,
            )
            for arm in arms
        ),
        steps_per_block=(1,) * len(arms),
        environment=ENVIRONMENT,
    )


def all_measured(knobs: Knobs, step_ms: StepMs, **more: object) -> list[Measurement]:
    return [measured(arms_without(knobs, chunk, EVERYTHING), step_ms, **more) for chunk in chunks(knobs, EVERYTHING)]


def found_in(knobs: Knobs, step_ms: StepMs, **more: object) -> Ablation:
    found = contributions(knobs, all_measured(knobs, step_ms, **more))
    assert found is not None
    return found


def saved_ms(found: Ablation) -> dict[str, float]:
    return {part.knob: part.saved_ms.median for part in found.contributions}


def a_trial(number: int, knobs: Knobs, outcome: Measurement | Failure, source: Source = Source.ABLATION) -> Trial:
    return Trial(
        run_id="run",
        number=number,
        source=source,
        knobs=dict(knobs),
        measurement=outcome if isinstance(outcome, Measurement) else None,
        failure=outcome if isinstance(outcome, Failure) else None,
        started_at=NOON,
        finished_at=NOON,
    )


# What each choice gives -----------------------------------------------------------------------------------------------


@given(plans, st.data())
@settings(max_examples=50)
def test_choices_that_do_not_touch_each_other_give_what_they_give_and_leave_nothing(knobs, data):
    given_ms = {name: data.draw(st.floats(-5, 50), label=name) for name in knobs}
    paces = data.draw(st.lists(st.floats(0.5, 2), min_size=10, max_size=10), label="paces")

    def step_ms(chosen: Knobs) -> float:
        return 1000 - sum(given_ms[name] for name in chosen)

    found = found_in(knobs, step_ms, pace=paces.__getitem__)
    usual = median(paces)
    assert found.plan_ms == pytest.approx(usual * step_ms(knobs))
    assert saved_ms(found) == pytest.approx({name: usual * ms for name, ms in given_ms.items()}, abs=1e-9)
    assert found.gain_ms.median == pytest.approx(usual * sum(given_ms.values()), abs=1e-9)
    for end in (found.interaction_ms.low, found.interaction_ms.median, found.interaction_ms.high):
        assert end == pytest.approx(0, abs=1e-9)
    assert found.unmeasured == {}


@given(plans, st.integers(0, 1000))
@settings(max_examples=50)
def test_whatever_choices_do_to_each_other_is_what_they_leave(knobs, seed):
    times: dict[frozenset[str], float] = {}

    def step_ms(chosen: Knobs) -> float:
        return times.setdefault(frozenset(chosen), random.Random(f"{seed}{sorted(chosen)}").uniform(1, 100))

    found = found_in(knobs, step_ms)
    expected = {name: step_ms(without(knobs, name)) - step_ms(knobs) for name in knobs}
    assert saved_ms(found) == pytest.approx(expected)
    assert found.gain_ms.median == pytest.approx(step_ms({}) - step_ms(knobs))
    assert found.interaction_ms.median == pytest.approx(step_ms({}) - step_ms(knobs) - sum(expected.values()))
    assert found.eager_ms - sum(expected.values()) - found.interaction_ms.median == pytest.approx(found.plan_ms)
    if found.gain_ms.median > 0:
        assert found.contributions[0].share == pytest.approx(
            found.contributions[0].saved_ms.median / found.gain_ms.median
        )
    else:
        assert {part.share for part in found.contributions} == {None}


@given(plans, st.data())
@settings(max_examples=30)
def test_choices_that_each_take_a_part_of_the_step_leave_something_positive(knobs, data):
    factors = {name: data.draw(st.floats(0.3, 0.9), label=name) for name in knobs}

    def step_ms(chosen: Knobs) -> float:
        product = 100.0
        for name in chosen:
            product *= factors[name]
        return product

    assert found_in(knobs, step_ms).interaction_ms.low > 0


def test_choices_that_need_each_other_leave_something_negative():
    found = found_in(PLAN, lambda chosen: 6.0 if chosen == PLAN else 10.0)
    assert set(saved_ms(found).values()) == {4.0}
    assert found.interaction_ms.median == 4 - 4 * 4


def test_a_choice_that_costs_time_is_negative():
    found = found_in({"layout": "channels_last", "precision": "bf16"}, lambda chosen: 10 + ("layout" in chosen))
    assert saved_ms(found) == {"layout": -1, "precision": 0}
    assert found.gain_ms.median == -1
    assert {part.share for part in found.contributions} == {None}


GIVEN_MS = {"precision": 3.0, "compile": 1.5, "update": 0.25, "capture": 0.75}


def additive(chosen: Knobs) -> float:
    return 10 - sum(GIVEN_MS[name] for name in chosen)


def in_two_processes(slower: float, blocks: tuple[int, int] = (20, 20), noise: random.Random | None = None) -> Ablation:
    """Of choices that do not touch each other; in the second process every step takes `slower` times as long."""
    found = [
        measured(
            arms_without(PLAN, chunk, EVERYTHING),
            lambda chosen, times=times: times * additive(chosen) * (noise.gauss(1, 0.01) if noise else 1),
            count,
        )
        for chunk, times, count in zip(chunks(PLAN, EVERYTHING), (1, slower), blocks, strict=True)
    ]
    told = contributions(PLAN, found)
    assert told is not None
    return told


@pytest.mark.parametrize("slower", [1.2, 0.5, 3.0])
@pytest.mark.parametrize("blocks", [(20, 20), (20, MIN_BLOCKS), (MIN_BLOCKS, 20)])
def test_a_process_that_is_slower_in_everything_changes_nothing_that_a_choice_gives(slower, blocks):
    found = in_two_processes(slower, blocks)
    usual = (1 + slower) / 2
    assert found.plan_ms == pytest.approx(usual * additive(PLAN))
    assert found.eager_ms == pytest.approx(usual * additive({}))
    assert saved_ms(found) == pytest.approx({name: usual * ms for name, ms in GIVEN_MS.items()})
    assert (found.interaction_ms.low, found.interaction_ms.high) == pytest.approx((0, 0), abs=1e-9)
    assert found.blocks == sum(blocks)


def test_an_interaction_that_is_not_there_is_seldom_seen_whatever_the_clocks_do():
    seen = [in_two_processes(1.1, noise=random.Random(seed)).interaction_ms for seed in range(30)]
    assert sum(not found.low <= 0 <= found.high for found in seen) <= 3


def test_in_the_gain_every_process_has_the_same_weight_and_its_interval_tells_how_far_they_differ():
    first, second = chunks(PLAN, EVERYTHING)
    looks = [
        measured(arms_without(PLAN, chunk, EVERYTHING), lambda chosen, ms=ms: 5.0 if chosen else ms, count)
        for chunk, ms, count in ((first, 10.0, 20), (second, 15.0, MIN_BLOCKS))
    ]
    gain = contributions(PLAN, looks).gain_ms
    assert (gain.low, gain.median, gain.high) == pytest.approx((5, 7.5, 10))


def test_a_choice_of_too_few_blocks_says_so_and_its_process_is_not_in_the_gain():
    found = in_two_processes(1.2, (20, 3))
    assert saved_ms(found) == pytest.approx({"precision": 3, "compile": 1.5})
    assert found.unmeasured == dict.fromkeys(("update", "capture"), TOO_FEW)
    assert (found.eager_ms, found.plan_ms, found.blocks) == (pytest.approx(10), 4.5, 20)
    assert found.interaction_ms.median == pytest.approx(1), "what was not measured is in it"


@pytest.mark.parametrize("blocks", [0, MIN_BLOCKS - 1])
def test_where_all_have_too_few_blocks_nothing_is_told_but_the_reason(blocks):
    trials = [a_trial(number, PLAN, look) for number, look in enumerate(all_measured(PLAN, additive, blocks=blocks))]
    assert ablation_of(PLAN, trials) is None
    assert reasons_of(PLAN, trials) == dict.fromkeys(PLAN, TOO_FEW)


def test_there_are_reasons_where_nothing_was_measured():
    assert reasons_of(PLAN, []) == {}
    assert reasons_of(STREAMED, []) == {}
    failed = a_trial(0, PLAN, failure("a wall"))
    assert reasons_of(PLAN, [failed]) == dict.fromkeys(("precision", "compile"), "a wall")


def test_intervals_are_those_of_the_paired_blocks():
    noise = random.Random(1)
    (chunk,) = chunks({"layout": "channels_last", "precision": "bf16"}, EVERYTHING)
    knobs = {name: FREE[name] for name in chunk}
    measurement = measured(arms_without(knobs, chunk, EVERYTHING), lambda chosen: 10.0 - 2 * len(chosen))
    arms = [
        arm.model_copy(update={"step_ms": tuple(ms + noise.gauss(0, 0.2) for ms in arm.step_ms)})
        for arm in measurement.arms
    ]
    found = contributions(knobs, [measurement.model_copy(update={"arms": tuple(arms)})])
    plan = arms[-1].step_ms
    for part, arm in zip(found.contributions, arms[1:-1], strict=True):
        low, high = bootstrap_interval([slow - quick for slow, quick in zip(arm.step_ms, plan, strict=True)])
        assert part.saved_ms.low < part.saved_ms.median < part.saved_ms.high
        assert (part.saved_ms.low, part.saved_ms.high) == pytest.approx((low, high), abs=0.06)
    assert found.interaction_ms.low < 0 < found.interaction_ms.high
    assert found == contributions(knobs, [measurement.model_copy(update={"arms": tuple(arms)})])


def test_what_was_found_survives_json():
    found = found_in(STREAMED, lambda chosen: 10.0 - len(chosen))
    assert Ablation.model_validate_json(found.model_dump_json()) == found


# What is measured -----------------------------------------------------------------------------------------------------


@given(all_plans)
@settings(max_examples=100)
def test_every_choice_is_left_out_once(knobs):
    assert refusals(knobs, EVERYTHING) == {}
    together = chunks(knobs, EVERYTHING)
    left_out = [knob for chunk in together for knob in chunk]
    assert len(left_out) == len(set(left_out))
    assert set(left_out) == (set(knobs) if len(knobs) > 1 else set())
    needed = companions(knobs, EVERYTHING)
    for chunk in together:
        assert 1 <= len(chunk) <= MOST_LEFT_OUT
        eager, *others, plan = arms_without(knobs, chunk, EVERYTHING)
        assert (eager.name, eager.knobs, plan.name, plan.knobs) == (EAGER, {}, CANDIDATE, knobs)
        assert len(others) <= MOST_LEFT_OUT
        arms = {arm.name: arm.knobs for arm in others}
        for knob in chunk:
            assert arms[f"{WITHOUT}{knob}"] == without(knobs, knob, *needed[knob])
            assert without(knobs, *needed[knob]) in [*arms.values(), knobs]
        assert all(EVERYTHING.allows(arm.knobs) is None for arm in others)
        assert Job(workload="zoo:mlp", device="cpu", arms=(eager, *others, plan))


def test_a_choice_that_others_need_is_compared_with_the_plan_without_them():
    assert chunks(STREAMED, EVERYTHING) == [("precision", "streams"), ("capture",)]
    took_ms = {("precision", "capture", "streams"): 4.0, ("precision", "capture"): 5.0, ("precision",): 8.0}
    measurements = all_measured(STREAMED, lambda chosen: took_ms.get(tuple(in_order(chosen)), 10.0))
    found = ablation_of(STREAMED, [a_trial(number, STREAMED, each) for number, each in enumerate(measurements)], {})
    assert saved_ms(found) == {"precision": 6, "capture": 3, "streams": 1}
    assert [part.beside for part in found.contributions] == [(), ("streams",), ()]
    assert found.unmeasured == {}


def test_all_that_need_it_go_with_a_choice():
    knobs = {**STREAMED, "pool_bytes": 2**30}
    assert companions(knobs, EVERYTHING)["capture"] == ("streams", "pool_bytes")
    assert companions(knobs, EVERYTHING)["streams"] == ("pool_bytes",)
    names = [arm.name for arm in arms_without(knobs, ("capture",), EVERYTHING)]
    assert names == [EAGER, "without streams and pool_bytes", "without capture", CANDIDATE]


def test_a_choice_that_cannot_go_at_all_says_why():
    class Strict:
        def allows(self, knobs):
            return None if "capture" in knobs else "nothing without a graph"

    assert refusals(STREAMED, Strict()) == {"capture": "nothing without a graph"}
    assert chunks(STREAMED, Strict()) == [("precision", "streams")]


@pytest.mark.parametrize("kind", FailureKind)
def test_two_that_fail_together_have_their_turn_alone_unless_time_ran_out(kind):
    first, second = chunks(PLAN, EVERYTHING)
    failed = a_trial(0, PLAN, failure("it broke", kind))
    pending = progress_of(PLAN, [failed], EVERYTHING).pending
    alone = () if kind is FailureKind.TIMEOUT else tuple((knob,) for knob in first)
    assert pending == (*alone, second)


@given(st.lists(st.sampled_from([*FailureKind, None]), min_size=12, max_size=12), plans)
@settings(max_examples=100)
def test_it_comes_to_an_end_whatever_fails(outcomes, knobs):
    trials: list[Trial] = []
    for number, kind in enumerate(outcomes):
        chunk = next_chunk(knobs, trials, EVERYTHING)
        if chunk is None:
            break
        outcome = failure("a wall", kind) if kind else measured(arms_without(knobs, chunk, EVERYTHING), lambda _: 1.0)
        trials.append(a_trial(number, knobs, outcome))
    assert next_chunk(knobs, trials, EVERYTHING) is None
    found = ablation_of(knobs, trials)
    if found is None:
        assert all(trial.failure for trial in trials)
    else:
        seen = {part.knob for part in found.contributions}
        assert seen | set(found.unmeasured) == set(knobs)
        assert not seen & set(found.unmeasured)
        assert set(found.unmeasured.values()) <= {"a wall"}


def test_what_was_not_reached_says_so():
    (first, *_) = all_measured(PLAN, lambda _: 1.0)
    found = ablation_of(PLAN, [a_trial(7, PLAN, first)])
    assert found.unmeasured == dict.fromkeys(("update", "capture"), UNREACHED)


def test_only_trials_of_this_plan_count():
    other = without(PLAN, "update")
    trials = [
        a_trial(number, PLAN, measured(confirmation_arms(PLAN, None), lambda _: 1.0), source)
        for number, source in enumerate(source for source in Source if source is not Source.ABLATION)
    ]
    trials.append(a_trial(20, other, all_measured(other, lambda _: 1.0)[0]))
    assert ablation_of(PLAN, trials) is None


# One choice -----------------------------------------------------------------------------------------------------------


def test_a_single_choice_is_told_by_the_last_confirmation_and_needs_no_more():
    knobs = {"precision": "bf16"}
    assert chunks(knobs, EVERYTHING) == []
    arms = (ArmSpec(name=EAGER), ArmSpec(name=STOCK, knobs=knobs))
    looks = [measured(arms, lambda chosen, fast=fast: fast if chosen else 10.0) for fast in (6.0, 7.0)]
    trials = [a_trial(number, knobs, look, Source.CONFIRM) for number, look in enumerate(looks)]
    found = ablation_of(knobs, trials, only("precision=bf16"))
    assert saved_ms(found) == {"precision": 3}
    assert (found.contributions[0].share, found.interaction_ms.median) == (1, 0)
    assert (found.eager_ms, found.plan_ms) == (10, 7)


def test_a_plan_that_changes_nothing_has_nothing_to_tell():
    look = measured(confirmation_arms({}, None)[:1] * 2, lambda _: 1.0)
    assert ablation_of({}, [a_trial(0, {}, look, Source.CONFIRM)]) is None


@pytest.mark.parametrize("size", range(2, 7))
def test_the_processes_are_few(size):
    for names in combinations(FREE, size):
        assert len(chunks({name: FREE[name] for name in names}, EVERYTHING)) == -(-size // MOST_LEFT_OUT)
