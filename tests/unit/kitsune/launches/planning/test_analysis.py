"""Where the time of a step goes, on steps that are small enough to reckon by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.analysis import (
    LaunchGroup,
    Link,
    Outlook,
    analysed,
    groups,
    in_ms,
    in_words,
    limit,
    outlook,
)
from kitsune.launches.planning.memory_plan import plan_memory
from kitsune.launches.planning.schedule import critical_path, critical_path_us, in_order, on_streams
from tests.unit.kitsune.launches.planning.schedules import problems, quick

WAIT_US = 1.5
NOTHING = LaunchGraph.of([], [])


def whole(*storages: int) -> tuple[Span, ...]:
    return tuple(Span(storage, 0, 8) for storage in storages)


def own(count: int) -> list[Storage]:
    """Of 8 bytes each; the last one is what the step returns."""
    return [Storage(8, is_own=True, is_kept=number == count - 1) for number in range(count)]


DIAMOND = LaunchGraph.of(
    [
        Launch("embed", (), whole(0)),
        Launch("product", whole(0), whole(1)),
        Launch("product", whole(0), whole(2)),
        Launch("sum", whole(1, 2), whole(3)),
    ],
    own(4),
)
DIAMOND_US = [10.0, 30.0, 20.0, 5.0]


def test_a_diamond_on_one_and_on_two_streams():
    schedules = {1: in_order(DIAMOND, DIAMOND_US), 2: on_streams(DIAMOND, DIAMOND_US, 2, WAIT_US)}
    outlooks = [outlook(asked, schedule, plan_memory(DIAMOND, schedule)) for asked, schedule in schedules.items()]
    found = analysed(DIAMOND, DIAMOND_US, outlooks, WAIT_US)
    assert (found.launches, found.sum_us, found.critical_us, found.critical_launches) == (4, 65.0, 45.0, 3)
    assert found.critical == (Link(1, "product", 30.0), Link(0, "embed", 10.0), Link(3, "sum", 5.0))
    assert found.groups[0] == LaunchGroup("product", 2, 50.0, 50 / 65)
    one, two = found.outlooks
    assert one == Outlook(1, 1, 4, 65.0, (0.0,), 0, 3 * 512, 4 * 512)
    assert (two.asked, two.streams, two.launches, two.predicted_us, two.waits) == (2, 2, 4, 45.0, 2)
    assert two.idle == pytest.approx((0.0, 1 - 20 / 45))
    assert found.limit.startswith("On 2 streams the step takes as long as its critical path")


def test_a_stream_on_which_nothing_runs_is_not_used():
    schedule = replace(on_streams(DIAMOND, DIAMOND_US, 2, WAIT_US), streams=4)
    found = outlook(4, schedule, plan_memory(DIAMOND, schedule))
    assert (found.asked, found.streams, len(found.idle)) == (4, 2, 2)
    assert "4 launches on 2 streams" in in_words(DIAMOND_US, schedule)


def test_of_many_names_and_launches_the_longest_ten_are_shown():
    chain = LaunchGraph.of([Launch(f"op{number}", whole(0), whole(0)) for number in range(12)], own(1))
    costs_us = [float(number) for number in range(12)]
    schedule = in_order(chain, costs_us)
    found = analysed(chain, costs_us, [outlook(1, schedule, plan_memory(chain, schedule))], WAIT_US)
    expected = [f"op{number}" for number in range(11, 1, -1)]
    assert [group.name for group in found.groups] == [link.name for link in found.critical] == expected
    assert (found.critical_launches, found.critical_us) == (12, 66.0)
    assert found.limit == "The critical path is 100% of the sum of all launches: streams cannot help."


def test_groups_of_the_same_time_come_by_name():
    graph = LaunchGraph.of([Launch(name, (), ()) for name in ("b", "a", "b", "c")], [])
    assert groups(graph, [1.0, 2.0, 1.0, 4.0]) == (
        LaunchGroup("c", 1, 4.0, 0.5),
        LaunchGroup("a", 1, 2.0, 0.25),
        LaunchGroup("b", 2, 2.0, 0.25),
    )


@quick
@given(problems)
def test_the_critical_path_is_a_chain_and_as_long_as_the_scheduler_says(problem):
    graph, costs_us = problem
    path = critical_path(graph, costs_us)
    assert sum(costs_us[launch] for launch in path) == pytest.approx(critical_path_us(graph, costs_us))
    assert all(first in graph.after[second] for first, second in pairwise(path))
    assert bool(path) == bool(graph.launches)


def test_a_step_that_launches_nothing():
    schedule = in_order(NOTHING, [])
    found = analysed(NOTHING, [], [outlook(1, schedule, plan_memory(NOTHING, schedule))], WAIT_US)
    assert (found.launches, found.sum_us, found.critical, found.groups) == (0, 0, (), ())
    assert found.limit == "The step launches nothing that takes time."


# What limits a step ---------------------------------------------------------------------------------------------------


def on(streams: int, predicted_us: float, *idle: float, asked: int = 0) -> Outlook:
    return Outlook(asked or streams, streams, 10, predicted_us, idle, 3, 0, 0)


ONE = on(1, 100.0, 0.0)
LONG, SHORT = [10.0] * 10, [2.9] * 8 + [38.4] * 2


@pytest.mark.parametrize(
    ("costs_us", "critical_us", "outlooks", "said"),
    [
        (LONG, 90.0, [ONE], "The critical path is 90% of the sum of all launches: streams cannot help."),
        (LONG, 89.0, [ONE, on(2, 93.0, 0.0, 0.9)], "On 2 streams the step takes as long as its critical path"),
        (LONG, 50.0, [ONE], "The one stream is busy all the time; others could help, 2.00 times at most."),
        (SHORT, 50.0, [ONE, on(1, 100.0, 0.0, asked=2)], "Many short launches: 80% of them take less than 3 us"),
        (LONG, 25.0, [ONE, on(2, 51.0, 0.01, 0.02)], "All 2 streams are busy all the time: more of them could help."),
        (LONG, 50.0, [ONE, on(2, 60.0, 0.4, 0.02)], "Stream 1 is busy all the time"),
        (SHORT, 50.0, [ONE, on(2, 60.0, 0.02, 0.4)], "Stream 0 is busy all the time"),
        (LONG, 25.0, [ONE, on(2, 51.0, 0.01, 0.02, asked=4)], "Stream 0 is busy all the time"),
        (LONG, 50.0, [ONE, on(2, 60.0, 0.1, 0.4)], "Launches wait for each other: the 2 streams are idle for 25%"),
        (LONG, 50.0, [on(2, 80.0, 0.0, 0.1), on(4, 60.0, 0.2, 0.3, 0.3, 0.4)], "the 4 streams are idle for 30%"),
    ],
)
def test_what_limits_a_step_is_said_in_a_sentence(costs_us, critical_us, outlooks, said):
    assert sum(costs_us) == pytest.approx(100.0)
    assert said in limit(costs_us, critical_us, outlooks, WAIT_US)


def test_a_plan_in_words():
    two = on_streams(DIAMOND, DIAMOND_US, 2, WAIT_US)
    assert (
        in_words(DIAMOND_US, two)
        == "4 launches on 2 streams: 0.0450 ms predicted, 0.0650 ms one after the other; 2 waits"
    )
    one = in_order(LaunchGraph.of([Launch("a", (), ())], []), [2100.0])
    assert in_words([2100.0], one) == "1 launch on 1 stream: 2.10 ms predicted, 2.10 ms one after the other; 0 waits"


@pytest.mark.parametrize(
    ("time_us", "shown"),
    [(0, "0.0000"), (45, "0.0450"), (840, "0.840"), (2104, "2.10"), (25_841, "25.8"), (3e5, "300")],
)
def test_times_have_three_digits(time_us, shown):
    assert in_ms(time_us) == f"{shown} ms"
