"""What may be begun within a budget."""

from datetime import timedelta

import pytest

from tests.unit.tuner.machine import ENVIRONMENT, NOON
from tests.unit.tuner.simulation import trial
from tuner.measuring.protocol import Inspection
from tuner.planning.pace import (
    LEAST_WARM_S,
    LEAST_WARM_STOCK_S,
    LEAVE_S,
    MOST_AT_ONCE,
    SLOW_FACTOR,
    WARM,
    WITH_EAGER,
    at_once,
    confirmation_s,
    eager_processes,
    elapsed_s,
    expected_s,
    is_in_vain,
    own_s,
    playoff_s,
    spares,
    timing_s,
    warm_s,
)
from tuner.records import Spent, Trial
from tuner.search.space import Space

GB = 10**9
GRAPH = {"precision": "bf16", "compile": "default", "capture": "step"}


def inspection(device: str, memory_bytes: int, peak_bytes: int) -> Inspection:
    environment = ENVIRONMENT.model_copy(update={"device": device, "memory_bytes": memory_bytes})
    return Inspection(
        environment=environment,
        fingerprint="f",
        inapplicable={},
        random=False,
        step_ms=1.0,
        peak_bytes=peak_bytes,
        parameters=1,
    )


def took(ended: Trial, seconds: float) -> Trial:
    return ended.model_copy(update={"finished_at": ended.started_at + timedelta(seconds=seconds)})


@pytest.mark.parametrize(
    ("device", "cores", "peak_bytes", "expected"),
    [
        ("cpu", 64, 1, 1),
        ("cuda", 2, 1, 1),
        ("cuda", 8, 1, 2),
        ("cuda", 64, 0, 4),
        ("cuda", 64, 15 * GB, 3),
        ("cuda", 64, 70 * GB, 1),
    ],
)
def test_how_many_build_side_by_side(device, cores, peak_bytes, expected):
    assert at_once(inspection(device, 80 * GB, peak_bytes), cores) == expected


def lasting(number: int, begin_s: float, end_s: float, **knobs: str) -> Trial:
    at = {"started_at": NOON + timedelta(seconds=begin_s), "finished_at": NOON + timedelta(seconds=end_s)}
    return trial(number, knobs).model_copy(update=at)


@pytest.mark.parametrize(
    ("device", "cores", "expected"),
    [("cuda:0", 64, MOST_AT_ONCE), ("cuda:1", 8, 2), ("cuda:0", 2, 1), ("cpu", 4, 1), ("cpu", 2, 0)],
)
def test_as_many_processes_are_ready_as_may_be_begun_at_once(device, cores, expected):
    assert spares(device, cores) == expected
    if device != "cpu":
        assert at_once(inspection("cuda", 80 * GB, 1), cores) == expected


def test_time_in_which_several_were_at_work_counts_once():
    assert elapsed_s([]) == 0
    assert elapsed_s([lasting(0, 0, 10), lasting(1, 5, 20), lasting(2, 6, 7), lasting(3, 30, 31)]) == 21
    assert elapsed_s([lasting(0, 0, -10)]) == 0, "a clock that was set back gives no time"


def test_what_a_trial_waited_is_the_time_of_others():
    spent = Spent(build_s=5, waited_s=20, timing_s=2)
    assert own_s(lasting(0, 0, 27).model_copy(update={"spent": spent})) == 7
    assert own_s(lasting(0, 0, 27)) == 27, "of an old one nothing else is known"


def test_a_trial_is_expected_to_take_what_those_took_that_compile_as_it_does():
    space = Space.of({})
    trials = [lasting(0, 0, 5), lasting(1, 0, 40, compile="default"), lasting(2, 0, 50, compile="default")]
    assert expected_s({"precision": "bf16"}, trials, space) == 5
    assert expected_s({"compile": "default", "precision": "bf16"}, trials, space) == 45
    assert expected_s({"compile": "default"}, trials[:1], space) == 5, "nothing better is known"
    assert expected_s({"compile": "default"}, trials[:1], space, 30) == 35, "by a guess, before one has ended"
    assert expected_s({"compile": "default", "precision": "bf16"}, trials, space, 30) == 45
    assert expected_s({"precision": "bf16"}, trials[:1], space, 30) == 5
    assert expected_s({"compile": "max-autotune"}, trials, space) == SLOW_FACTOR * 45
    assert expected_s({}, [], space) == 0


def test_a_confirmation_is_shorter_where_processes_build_side_by_side():
    spent = Spent(build_s=10, numerics_s=30, timing_s=3)
    best = lasting(1, 0, 43, compile="default").model_copy(update={"spent": spent})
    one_by_one = confirmation_s(best, None, 5, 1)
    assert one_by_one == 5 * (10 + 3)
    assert confirmation_s(best, None, 5, 4) == 10 + 5 * (3 + LEAVE_S)
    assert confirmation_s(best, None, 2, 1) == 2 * 13
    stock = lasting(2, 0, 43, compile="reduce-overhead").model_copy(update={"spent": spent})
    assert confirmation_s(best, stock, 2, 1) == 2 * (10 + 4.5), "three arms are timed, where a trial times two"
    assert confirmation_s(None, None, 5, 1) == 0


def test_what_was_compiled_before_is_expected_to_take_a_part_of_it():
    space = Space.of({})
    cold = lasting(1, 0, 80, compile="default", precision="bf16")
    captured = {"compile": "default", "precision": "bf16", "capture": "step"}
    assert expected_s(captured, [cold], space) == WARM * 80 == warm_s(80)
    assert (warm_s(20), warm_s(5)) == (LEAST_WARM_S, 5), "tracing and planning are in no cache"
    assert (warm_s(80, stock=True), warm_s(20, stock=True)) == (16, LEAST_WARM_STOCK_S), "nothing is planned"
    assert expected_s(captured, [cold, lasting(2, 80, 100, **captured)], space) == 20, "what one took that found it"
    other = {"compile": "default", "precision": "fp16"}
    assert expected_s(other, [cold], space) == 80, "this has yet to be compiled"


def test_the_long_look_takes_its_part_of_what_is_side_by_side_and_stands_still_while_others_are_timed():
    best = lasting(1, 0, 43, compile="default").model_copy(update={"spent": Spent(build_s=10, timing_s=3)})
    assert confirmation_s(best, None, 5, 1, 20) == 5 * 13 + 20
    assert confirmation_s(best, None, 5, 4, 20) == confirmation_s(best, None, 5, 4), "it ends beside the others"
    assert confirmation_s(best, None, 5, 2, 60) == max(3 * 13, (5 * 13 + 60) / 2, 60 + 5 * 3) == 75
    assert confirmation_s(lasting(1, 0, 43), None, 5, 4, 20) == 2 * 43, "of an old one it is not known"


def test_the_step_as_given_is_timed_in_few_processes_where_another_stock_configuration_is_clearly_faster():
    best, stock = trial(1, GRAPH, speedup=8.0), trial(2, {"compile": "reduce-overhead"}, speedup=7.0)
    assert eager_processes(best, stock, 5) == WITH_EAGER
    assert eager_processes(best, stock, 1) == 1
    assert eager_processes(best, None, 5) == eager_processes(stock, stock, 5) == 5
    assert eager_processes(best, trial(2, {"compile": "reduce-overhead"}, speedup=1.2), 5) == 5
    assert eager_processes(best, trial(2, {}, speedup=1.0), 5) == 5


def test_a_play_off_builds_and_times_all_in_one_process():
    spent = Spent(start_s=5, build_s=1, numerics_s=30, timing_s=2)
    contenders = [lasting(number, 0, 43).model_copy(update={"spent": spent}) for number in range(4)]
    assert playoff_s(contenders) == 5 + 4 * (1 + 2), "what was compiled is compiled, and its numbers are proven"
    assert playoff_s([]) == 0


def test_beside_the_step_as_given_there_is_time_for_three_rounds():
    assert timing_s(0.001) == timing_s(0.2) == 4.0
    assert timing_s(1.0) == 16.0


def test_what_cannot_end_in_time_is_waited_for_in_vain():
    ended = took(trial(1, {"precision": "bf16", "compile": "default", "update": "fused"}), 100)
    begun = {"precision": "fp16", "compile": "default"}
    space = Space.of({})
    assert is_in_vain([(begun, 10)], [ended], space, 45)
    assert not is_in_vain([(begun, 10)], [ended], space, 55), "it may be quicker than others"
    assert not is_in_vain([(begun, 50)], [ended], space, 45), "it has been at work for long"
    assert not is_in_vain([(begun, 10), ({}, 0)], [ended, took(trial(0, {}), 5)], space, 45), "one of them may end"
    known = {**ended.knobs, "update": "kitsune"}
    assert not is_in_vain([(known, 0)], [ended], space, 45), "its code is compiled already"
    assert not is_in_vain([(begun, 10)], [took(trial(0, {}), 100)], space, 1), "nobody knows what compiling takes"
