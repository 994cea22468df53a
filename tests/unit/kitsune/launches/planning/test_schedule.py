import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.schedule import (
    Placed,
    Schedule,
    along_critical_path,
    clocks,
    critical_path,
    critical_path_us,
    earliest_us,
    ends_of,
    feeds_of,
    in_order,
    just_in_time,
    listed,
    on_streams,
    when_needed,
    with_waits,
)
from tests.unit.kitsune.launches.model.test_launch_graph import graphs, ordered_pairs
from tests.unit.kitsune.launches.order import happens_before

NBYTES = 16
quick = settings(max_examples=200)
waits = st.sampled_from([0.0, 0.5, 2.0])
stream_counts = st.sampled_from(range(1, 9))


Problem = tuple[LaunchGraph, list[float]]
Hold = Callable[[LaunchGraph, list[float], float], LaunchGraph]
Case = tuple[LaunchGraph, Schedule]


def with_costs(graph: LaunchGraph, seed: int) -> Problem:
    """A graph and what its launches cost, nothing among it."""
    rng = random.Random(seed)
    return graph, [rng.choice([0.0, 0.5, 1.0, 3.0, 7.25, rng.uniform(0, 100)]) for _ in graph.launches]


problems = st.builds(with_costs, graphs, st.integers(0, 2**32))


@st.composite
def schedules(draw: st.DrawFn) -> Case:
    """A graph and a schedule of it: by our rules, or with launches issued and put on streams by chance."""
    graph, costs_us = draw(problems)
    streams = draw(stream_counts)
    if streams > 1 and draw(st.booleans()):
        for_ends = draw(st.integers(0, streams - 2))
        apart = {"for_ends": for_ends, "for_feeds": draw(st.integers(0, streams - 2 - for_ends))}
        return graph, along_critical_path(graph, costs_us, streams, draw(waits), **apart)
    if draw(st.booleans()):
        return graph, spread(graph, costs_us, streams, draw(waits))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return graph, Schedule(streams, with_waits(graph, shuffled(graph, streams, rng), streams))


def spread(graph: LaunchGraph, costs_us: list[float], streams: int, wait_us: float) -> Schedule:
    """The list schedule even where one stream would be as quick, so that there is something to see."""
    return Schedule(streams, with_waits(graph, listed(graph, costs_us, streams, wait_us), streams))


def shuffled(graph: LaunchGraph, streams: int, rng: random.Random) -> list[Placed]:
    """Any legal issue order, any stream."""
    placed: list[Placed] = []
    issued: set[int] = set()
    while len(issued) < len(graph.launches):
        ready = [
            launch
            for launch in range(len(graph.launches))
            if launch not in issued and issued.issuperset({*graph.after[launch], *graph.issued_after[launch]})
        ]
        launch = rng.choice(ready)
        issued.add(launch)
        placed.append(Placed(launch, rng.randrange(streams), (), 0.0, 0.0))
    return placed


def ended_before(schedule: Schedule) -> dict[int, set[int]]:
    """For every launch those that have ended when it begins: by stream order and by waits, nothing else."""
    found: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for placed in schedule.placed:
        direct = {*placed.waits} | ({last[placed.stream]} if placed.stream in last else set())
        assert direct <= set(found), "waits for a launch whose event is not recorded yet"
        found[placed.launch] = direct.union(*(found[launch] for launch in direct))
        last[placed.stream] = placed.launch
    return found


def missed(pairs: set[tuple[int, int]], schedule: Schedule) -> set[tuple[int, int]]:
    """Those of the pairs of launches that the schedule does not keep in order."""
    before = ended_before(schedule)
    return {(first, second) for first, second in pairs if first not in before[second]}


def chains(*lengths: int) -> LaunchGraph:
    """Chains of launches of which each waits for the one before it; the chains are independent."""
    launches = [
        Launch("op", (), (Span(chain, 0, NBYTES),)) for chain, length in enumerate(lengths) for _ in range(length)
    ]
    return LaunchGraph.of(launches, [Storage(NBYTES, is_own=False, is_kept=False)] * len(lengths))


def diamond(branches: int) -> LaunchGraph:
    """One launch, branches that need it, and one that needs all of them."""
    spans = [Span(storage, 0, NBYTES) for storage in range(branches + 2)]
    first, last = Launch("first", (), (spans[0],)), Launch("last", tuple(spans[1:-1]), (spans[-1],))
    middle = [Launch("middle", (spans[0],), (span,)) for span in spans[1:-1]]
    return LaunchGraph.of([first, *middle, last], [Storage(NBYTES, is_own=True, is_kept=False)] * len(spans))


def streams_of(schedule: Schedule) -> dict[int, int]:
    return {placed.launch: placed.stream for placed in schedule.placed}


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


@pytest.mark.parametrize("rule", [on_streams, along_critical_path, partial(along_critical_path, for_ends=1)])
@pytest.mark.parametrize(
    ("costs_us", "wait_us", "message"),
    [
        ([1.0], 0.0, "2 launches, but 1 costs"),
        ([1.0, float("nan")], 0.0, "cannot cost nan us"),
        ([1.0, 1.0], -1.0, "a wait cannot cost -1.0 us"),
        ([1.0, 1.0], float("nan"), "a wait cannot cost nan us"),
        ([1.0, 1.0], float("inf"), "a wait cannot cost inf us"),
        ([1e308, 1e308], 0.0, "longer than a float can hold"),
        ([1.0, 1.0], 1e308, "longer than a float can hold"),
    ],
)
def test_every_rule_refuses_times_that_are_none(
    rule: Callable[..., Schedule], costs_us: list[float], wait_us: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rule(chains(1, 1), costs_us, 3, wait_us)


@quick
@given(problems, st.integers(4, 8), waits, st.integers(0, 2))
def test_no_schedule_ends_later_than_all_launches_with_a_wait_before_each(
    problem: Problem, streams: int, wait_us: float, for_ends: int
) -> None:
    graph, costs_us = problem
    schedule = along_critical_path(graph, costs_us, streams, wait_us, for_ends=for_ends)
    assert schedule.makespan_us <= (sum(costs_us) + len(costs_us) * wait_us) * (1 + 1e-9)
    assert schedule.makespan_us >= critical_path_us(graph, costs_us) * (1 - 1e-9)


def test_a_path_of_its_own_may_be_promised_to_take_longer_than_one_stream() -> None:
    graph, costs_us = diamond(2), [1.0, 2.0, 2.0, 1.0]
    assert along_critical_path(graph, costs_us, 2, 2.0).makespan_us == 8.0 > in_order(graph, costs_us).makespan_us


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


def products(starts_us):
    """A product behind each of some launches that run side by side and end one after the other."""
    spans = [Span(number, 0, NBYTES) for number in range(2 * len(starts_us))]
    launches = [Launch("before", (), (spans[2 * number],)) for number in range(len(starts_us))]
    for number in range(len(starts_us)):
        span = spans[2 * number : 2 * number + 2]
        launches.append(Launch("product", (span[0],), (span[1],), keeps_workspace=True))
    return LaunchGraph.of(launches, [Storage(NBYTES, True, True)] * len(spans)), [*starts_us, *[0.5] * len(starts_us)]


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


@quick
@given(problems, st.integers(2, 8), waits)
def test_the_critical_path_has_the_first_stream_to_itself(problem: Problem, streams: int, wait_us: float) -> None:
    graph, costs_us = problem
    schedule = along_critical_path(graph, costs_us, streams, wait_us)
    assert {each.launch for each in schedule.placed if each.stream == 0} == set(critical_path(graph, costs_us))


@quick
@given(problems, st.integers(4, 8), waits, st.integers(1, 2))
def test_what_ends_the_step_may_have_the_last_streams_to_itself(
    problem: Problem, streams: int, wait_us: float, for_ends: int
) -> None:
    graph, costs_us = problem
    schedule = along_critical_path(graph, costs_us, streams, wait_us, for_ends=for_ends)
    path, awaited = critical_path(graph, costs_us), set(chain.from_iterable(graph.after))
    ready_us = earliest_us(graph, costs_us)
    streams_of = {each.launch: each.stream for each in schedule.placed}
    for launch, stream in streams_of.items():
        last = streams - for_ends
        is_early_end = launch not in awaited and ready_us[launch] < ready_us[path[-1]]
        assert stream in ([0] if launch in path else range(last, streams) if is_early_end else range(1, last))


def test_what_is_ready_at_the_very_end_does_not_stand_behind_other_ends() -> None:
    """The last gradient of 10 us lets three updates begin, one of them on the path; the first one had its end."""
    gradients = [Span(0, 0, NBYTES), Span(1, 0, NBYTES)]
    backward = [Launch("op", (), (gradients[0],)), Launch("op", (gradients[0],), (gradients[1],))]
    updates = [Launch("update", (gradients[at],), ()) for at in (0, 1, 1, 1)]
    storages = [Storage(NBYTES, is_own=False, is_kept=False)] * 2
    graph = LaunchGraph.of([*backward, *updates], storages)
    schedule = along_critical_path(graph, [10.0, 10.0, 5.0, 5.0, 5.0, 5.0], 4, 1.0, for_ends=1)
    assert {each.launch: each.stream for each in schedule.placed} == {0: 0, 1: 0, 2: 3, 3: 0, 4: 1, 5: 2}


@quick
@given(problems, st.integers(6, 8), waits, st.integers(1, 2), st.integers(0, 2))
def test_what_the_critical_path_reads_may_have_streams_beside_it(
    problem: Problem, streams: int, wait_us: float, for_feeds: int, for_ends: int
) -> None:
    graph, costs_us = problem
    schedule = along_critical_path(graph, costs_us, streams, wait_us, for_feeds=for_feeds, for_ends=for_ends)
    path = set(critical_path(graph, costs_us))
    sources = graph.read_from()
    ancestors: set[int] = set()
    for launch in reversed(range(len(graph.launches))):
        if launch in path or launch in ancestors:
            ancestors |= sources[launch]
    fed = {each.launch for each in schedule.placed if 0 < each.stream <= for_feeds}
    assert fed == ancestors - path
    assert {each.launch for each in schedule.placed if each.stream == 0} == path


def test_what_the_critical_path_only_writes_over_does_not_feed_it() -> None:
    """A result, its reader off the path, and the path, which writes over the result: in place, or anew."""
    result, other = Span(0, 0, NBYTES), Span(1, 0, NBYTES)
    launches = [
        Launch("makes", (), (result,)),
        Launch("reads", (result,), (Span(2, 0, NBYTES),)),
        Launch("goes on", (result,), (other,)),
        Launch("writes over", (other,), (result,)),
    ]
    graph = LaunchGraph.of(launches, [Storage(NBYTES, True, True)] * 3)
    assert graph.after[3] == (1, 2)
    assert graph.read_from() == [set(), {0}, {0}, {2}]
    assert feeds_of(graph, frozenset({0, 2, 3})) == frozenset()
    assert feeds_of(graph, frozenset({1})) == {0}


@pytest.mark.parametrize(
    ("streams", "apart"),
    [(1, {}), (2, {"for_ends": 1}), (3, {"for_ends": 2}), (2, {"for_feeds": 1}), (3, {"for_feeds": 1, "for_ends": 1})],
)
def test_a_path_and_the_rest_need_enough_streams(streams: int, apart: dict[str, int]) -> None:
    graph, costs_us = products([2.0, 3.0])
    with pytest.raises(ValueError, match=f"need more than {streams} streams"):
        along_critical_path(graph, costs_us, streams, 0.5, **apart)


@quick
@pytest.mark.parametrize("hold", [just_in_time, when_needed])
@given(problem=problems, lead_us=st.sampled_from([0.0, 5.0, 1000.0]))
def test_what_is_held_back_makes_the_critical_path_no_longer(hold: Hold, problem: Problem, lead_us: float) -> None:
    graph, costs_us = problem
    late = hold(graph, costs_us, lead_us)
    assert critical_path_us(late, costs_us) == pytest.approx(critical_path_us(graph, costs_us))
    schedule = along_critical_path(late, costs_us, 3, 0.5)
    assert not missed(ordered_pairs(graph), schedule)


@pytest.mark.parametrize(("lead_us", "awaited"), [(0.0, (1,)), (29.0, (1,)), (30.0, (0,)), (60.0, ())])
def test_what_is_needed_late_waits_until_shortly_before(lead_us: float, awaited: tuple[int, ...]) -> None:
    """Three of 30 us in a row, and one of 1 us beside them that may begin after 89 us."""
    late = just_in_time(chains(3, 1), [30.0, 30.0, 30.0, 1.0], lead_us)
    assert late.after == ((), (0,), (1,), awaited)


def test_an_update_need_not_wait_for_the_end_of_the_step() -> None:
    """Three of 30 us in a row; 1 us that an update of 5 us behind the first and the last of the three need.

    By the end of the step nothing before the last update is urgent, so that the first one would wait for it as well.
    """
    spans = [Span(storage, 0, NBYTES) for storage in range(4)]
    writes = [spans[0], spans[1], spans[2], spans[3]]
    chain_of_three = [Launch("op", tuple(writes[:at]), (writes[at],)) for at in range(3)]
    count = Launch("count", (), (spans[3],))
    updates = [Launch("update", (spans[0], spans[3]), ()), Launch("update", (spans[2], spans[3]), ())]
    storages = [Storage(NBYTES, is_own=False, is_kept=False)] * 4
    graph = LaunchGraph.of([*chain_of_three, count, *updates], storages)
    costs_us = [30.0, 30.0, 30.0, 1.0, 5.0, 5.0]
    late, needed = (hold(graph, costs_us, 0.0) for hold in (just_in_time, when_needed))
    assert late.after[3:] == ((1,), (0, 2, 3), (2, 3))
    assert needed.after[3:] == ((), (0, 3), (2, 3))


@quick
@given(problems)
def test_what_nothing_needs_is_not_held_back(problem: Problem) -> None:
    graph, costs_us = problem
    needed = when_needed(graph, costs_us, 0.0)
    ready_us, held_us = earliest_us(graph, costs_us), earliest_us(needed, costs_us)
    for launch in ends_of(graph):
        assert held_us[launch] == pytest.approx(ready_us[launch])
