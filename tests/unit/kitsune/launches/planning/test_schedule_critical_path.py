"""Schedules that give the critical path a stream of its own, and launches that are held back until they are needed."""

from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.schedule import (
    Schedule,
    along_critical_path,
    critical_path,
    critical_path_us,
    earliest_us,
    ends_of,
    feeds_of,
    in_order,
    just_in_time,
    on_streams,
    when_needed,
)
from tests.unit.kitsune.launches.model.test_launch_graph import ordered_pairs
from tests.unit.kitsune.launches.planning.schedules import (
    NBYTES,
    Hold,
    Problem,
    chains,
    diamond,
    missed,
    problems,
    products,
    quick,
    waits,
)


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
