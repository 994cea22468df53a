"""Schedules on streams: what they promise of the order, how soon they end, and cases that are reckoned by hand."""

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.schedule import (
    Placed,
    clocks,
    critical_path_us,
    in_order,
    listed,
    on_streams,
    with_waits,
)
from tests.unit.kitsune.launches.model.test_launch_graph import ordered_pairs
from tests.unit.kitsune.launches.order import happens_before
from tests.unit.kitsune.launches.planning.schedules import (
    NBYTES,
    Case,
    Problem,
    chains,
    diamond,
    ended_before,
    missed,
    problems,
    products,
    quick,
    schedules,
    spread,
    stream_counts,
    streams_of,
    waits,
)

# Legal ----------------------------------------------------------------------------------------------------------------


@quick
@given(schedules())
def test_every_hazard_is_ordered(case: Case) -> None:
    graph, schedule = case
    assert missed(ordered_pairs(graph), schedule) == set()


@quick
@given(schedules())
def test_every_wait_is_needed(case: Case) -> None:
    graph, schedule = case
    pairs = ordered_pairs(graph)
    for position, placed in enumerate(schedule.placed):
        for wait in placed.waits:
            fewer = replace(placed, waits=tuple(launch for launch in placed.waits if launch != wait))
            without = replace(schedule, placed=(*schedule.placed[:position], fewer, *schedule.placed[position + 1 :]))
            assert missed(pairs, without)


@quick
@given(schedules())
def test_waits_are_for_other_streams_and_not_implied_by_each_other(case: Case) -> None:
    _, schedule = case
    before, stream_of = ended_before(schedule), streams_of(schedule)
    for placed in schedule.placed:
        others = [stream_of[launch] for launch in placed.waits]
        assert len({placed.stream, *others}) == 1 + len(others)
        assert not any(first in before[second] for first in placed.waits for second in placed.waits)
    assert schedule.awaited == {launch for placed in schedule.placed for launch in placed.waits}


@quick
@given(problems, stream_counts, waits)
def test_launches_are_issued_once_and_in_a_legal_order(problem: Problem, streams: int, wait_us: float) -> None:
    graph, costs_us = problem
    for schedule in (on_streams(graph, costs_us, streams, wait_us), spread(graph, costs_us, streams, wait_us)):
        order = [placed.launch for placed in schedule.placed]
        assert sorted(order) == list(range(len(graph.launches)))
        assert all(order.index(first) < order.index(second) for first, second in ordered_pairs(graph))
        drawing = [launch for launch in order if graph.launches[launch].draws]
        assert drawing == sorted(drawing)
        assert all(0 <= placed.stream < schedule.streams for placed in schedule.placed)


@quick
@given(schedules())
def test_clocks_know_exactly_what_has_ended(case: Case) -> None:
    _, schedule = case
    before, seen = ended_before(schedule), clocks(schedule)
    for second, placed in enumerate(schedule.placed):
        ended = before[placed.launch]
        lanes = [[one.launch for one in schedule.placed if one.stream == s] for s in range(schedule.streams)]
        assert seen[second] == tuple(len(ended.intersection(lane)) for lane in lanes)
        for first, other in enumerate(schedule.placed):
            assert happens_before(schedule, seen, first, second) == (other.launch in ended)


# Quick ----------------------------------------------------------------------------------------------------------------


@quick
@given(problems, st.integers(2, 8), waits)
def test_launches_begin_as_soon_as_their_stream_and_what_they_need_allow(
    problem: Problem, streams: int, wait_us: float
) -> None:
    graph, costs_us = problem
    free_us = [0.0] * streams
    ended: dict[int, Placed] = {}
    for placed in spread(graph, costs_us, streams, wait_us).placed:
        needed = [ended[launch] for launch in graph.after[placed.launch]]
        arrivals_us = [one.end_us + (wait_us if one.stream != placed.stream else 0.0) for one in needed]
        assert placed.begin_us == max([free_us[placed.stream], *arrivals_us])
        assert placed.end_us == placed.begin_us + costs_us[placed.launch]
        free_us[placed.stream] = placed.end_us
        ended[placed.launch] = placed


@quick
@given(problems, stream_counts, waits)
def test_the_makespan_lies_between_the_critical_path_and_one_stream(
    problem: Problem, streams: int, wait_us: float
) -> None:
    graph, costs_us = problem
    schedule = on_streams(graph, costs_us, streams, wait_us)
    longest_us = in_order(graph, costs_us).makespan_us
    # The same costs, added up in another order.
    assert critical_path_us(graph, costs_us) * (1 - 1e-9) <= schedule.makespan_us <= longest_us * (1 + 1e-9)
    assert in_order(graph, costs_us).makespan_us == pytest.approx(sum(costs_us))


@quick
@given(problems, stream_counts)
def test_the_list_schedule_keeps_grahams_bound(problem: Problem, streams: int) -> None:
    """Whatever the order, streams that are never idle without need end by sum / k + (1 - 1 / k) * critical path."""
    graph, costs_us = problem
    graph = LaunchGraph.of([replace(launch, draws=False) for launch in graph.launches], graph.storages)
    schedule = spread(graph, costs_us, streams, 0.0)
    bound_us = sum(costs_us) / streams + (1 - 1 / streams) * critical_path_us(graph, costs_us)
    assert schedule.makespan_us <= bound_us * (1 + 1e-9)


@quick
@given(problems)
def test_the_critical_path_is_the_longest_chain(problem: Problem) -> None:
    graph, costs_us = problem
    pairs = ordered_pairs(graph)
    longest_us: list[float] = []
    for second, cost_us in enumerate(costs_us):
        longest_us.append(
            cost_us + max([0.0, *(longest_us[first] for first in range(second) if (first, second) in pairs)])
        )
    assert critical_path_us(graph, costs_us) == pytest.approx(max([0.0, *longest_us]))


@quick
@given(problems, waits)
def test_one_stream_keeps_the_recorded_order(problem: Problem, wait_us: float) -> None:
    graph, costs_us = problem
    schedule = on_streams(graph, costs_us, 1, wait_us)
    assert schedule == in_order(graph, costs_us)
    assert [placed.launch for placed in schedule.placed] == list(range(len(graph.launches)))
    assert all(placed.waits == () and placed.stream == 0 for placed in schedule.placed)


@quick
@given(problems, stream_counts, waits)
def test_the_same_step_gives_the_same_schedule(problem: Problem, streams: int, wait_us: float) -> None:
    graph, costs_us = problem
    again = LaunchGraph.of(graph.launches, graph.storages)
    assert on_streams(graph, costs_us, streams, wait_us) == on_streams(again, list(costs_us), streams, wait_us)


# By hand --------------------------------------------------------------------------------------------------------------


def test_independent_launches_run_side_by_side() -> None:
    schedule = on_streams(chains(1, 1, 1), [4.0, 4.0, 4.0], 3, 1.0)
    assert schedule.makespan_us == 4.0
    assert sorted(streams_of(schedule).values()) == [0, 1, 2]
    assert schedule.awaited == frozenset()


def test_a_chain_stays_on_its_stream_even_when_waits_are_free() -> None:
    # Stream 0 is free as well when the second launch of the longer chain can begin.
    schedule = spread(chains(1, 2), [4.0, 4.0, 0.0], 2, 0.0)
    assert [(placed.launch, placed.stream, placed.waits) for placed in schedule.placed] == [
        (0, 0, ()),
        (1, 1, ()),
        (2, 1, ()),
    ]


def test_the_longest_way_comes_first() -> None:
    graph = chains(1, 1, 1, 3)
    assert on_streams(graph, [4.0] * 6, 2, 0.0).makespan_us == critical_path_us(graph, [4.0] * 6) == 12.0


def test_a_free_stream_does_not_wait_for_the_most_urgent_launch() -> None:
    # Both branches are more urgent than the last launch, but it fits in before them.
    branches = diamond(2)
    alone = Launch("alone", (), (Span(len(branches.storages), 0, NBYTES),))
    graph = LaunchGraph.of([*branches.launches, alone], [*branches.storages, branches.storages[0]])
    assert on_streams(graph, [10.0, 20.0, 20.0, 1.0, 9.0], 2, 0.0).makespan_us == 31.0


def test_a_draw_that_holds_up_an_urgent_one_is_urgent_itself() -> None:
    # One drawing launch of no further use, fillers, and a drawing launch at the head of a long chain.
    graph = chains(1, 1, 1, 3)
    draws = {0, 3}
    launches = [replace(launch, draws=number in draws) for number, launch in enumerate(graph.launches)]
    graph = LaunchGraph.of([launches[1], launches[2], launches[0], *launches[3:]], graph.storages)
    schedule = on_streams(graph, [6.0, 6.0, 1.0, 6.0, 6.0, 6.0], 2, 0.0)
    assert schedule.makespan_us == 18.0


def test_one_wait_for_each_other_stream_at_the_end_of_a_diamond() -> None:
    schedule = on_streams(diamond(3), [1.0, 9.0, 9.0, 9.0, 1.0], 3, 2.0)
    assert [len(placed.waits) for placed in schedule.placed] == [0, 0, 1, 1, 2]
    assert schedule.makespan_us == 1 + 2 + 9 + 2 + 1


def test_of_several_on_one_stream_only_the_latest_is_awaited() -> None:
    graph = diamond(3)
    streams = {0: 0, 1: 1, 2: 1, 3: 1, 4: 0}
    placed = with_waits(graph, [Placed(launch, stream, (), 0.0, 0.0) for launch, stream in streams.items()], 2)
    assert [one.waits for one in placed] == [(), (0,), (), (), (3,)]


def test_what_the_awaited_launch_knew_is_not_awaited_again() -> None:
    spans = [Span(storage, 0, NBYTES) for storage in range(3)]
    launches = [
        Launch("a", (), (spans[0],)),
        Launch("b", (spans[0],), (spans[1],)),
        Launch("c", (spans[0], spans[1]), ()),
    ]
    storages = [Storage(NBYTES, is_own=False, is_kept=False)] * 3
    # The edge that the graph left out comes back by hand: the streams must see by themselves that it is implied.
    graph = replace(LaunchGraph.of(launches, storages), after=((), (0,), (0, 1)))
    placed = with_waits(graph, [Placed(launch, launch, (), 0.0, 0.0) for launch in range(3)], 3)
    assert [one.waits for one in placed] == [(), (0,), (1,)]


def test_waits_that_cost_more_than_they_bring_are_not_made() -> None:
    graph, costs_us = diamond(2), [1.0, 2.0, 2.0, 1.0]
    assert on_streams(graph, costs_us, 2, 0.5).makespan_us < 6.0
    assert on_streams(graph, costs_us, 2, 2.0) == in_order(graph, costs_us)


def test_a_wait_for_a_launch_that_costs_nothing_still_costs_its_time() -> None:
    schedule = spread(diamond(2), [0.0, 10.0, 10.0, 0.0], 2, 3.0)
    assert sorted(placed.begin_us for placed in schedule.placed) == [0.0, 0.0, 3.0, 13.0]


def test_nothing_to_do_takes_no_time() -> None:
    graph = LaunchGraph.of([], [])
    assert on_streams(graph, [], 4, 1.0).makespan_us == critical_path_us(graph, []) == 0.0


@pytest.mark.parametrize(
    ("costs_us", "streams", "wait_us", "message"),
    [
        ([1.0], 2, 0.0, "2 launches, but 1 costs"),
        ([1.0, -1.0], 2, 0.0, r"launch 1 \(op\) cannot cost -1.0 us"),
        ([1.0, float("nan")], 2, 0.0, "cannot cost nan us"),
        ([1.0, float("inf")], 2, 0.0, "cannot cost inf us"),
        ([1.0, 1.0], 0, 0.0, "at least one stream, not 0"),
        ([1.0, 1.0], 2, -1.0, "a wait cannot cost -1.0 us"),
        ([1.0, 1.0], 2, float("nan"), "a wait cannot cost nan us"),
    ],
)
def test_nonsense_is_refused(costs_us: list[float], streams: int, wait_us: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_streams(chains(1, 1), costs_us, streams, wait_us)


def test_five_thousand_launches_take_less_than_two_seconds() -> None:
    rng = random.Random(0)
    spans = [Span(storage, 0, NBYTES) for storage in range(2500)]
    launches = [
        Launch("op", tuple(rng.choices(spans[: number // 2 + 1], k=2)), (rng.choice(spans[: number // 2 + 1]),))
        for number in range(5000)
    ]
    costs_us = [rng.choice([0.0, 1.0, 5.0, 20.0]) for _ in launches]
    begin = time.process_time()
    graph = LaunchGraph.of(launches, [Storage(NBYTES, is_own=True, is_kept=False)] * len(spans))
    graphed = time.process_time()
    on_streams(graph, costs_us, 8, 1.0)
    assert graphed - begin < 2
    assert time.process_time() - graphed < 2


def test_products_share_streams_where_that_costs_no_more_than_a_wait():
    graph, costs_us = products([2.0, 2.5, 3.0])
    used = {each.stream for each in listed(graph, costs_us, 3, 1.5) if graph.launches[each.launch].keeps_workspace}
    assert len(used) == 1
    plain = LaunchGraph.of([replace(launch, keeps_workspace=False) for launch in graph.launches], graph.storages)
    assert len({each.stream for each in listed(plain, costs_us, 3, 1.5) if each.launch >= 3}) == 3


def test_and_do_not_where_it_costs_more():
    graph, costs_us = products([2.0, 2.0, 2.0])
    long = [*costs_us[:3], 50.0, 50.0, 50.0]
    assert len({each.stream for each in listed(graph, long, 3, 1.5) if each.launch >= 3}) == 3
