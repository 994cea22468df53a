"""Graphs of launches, what they cost, and schedules of them, for tests by hand and by chance."""

import random
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.schedule import Placed, Schedule, along_critical_path, listed, with_waits
from tests.unit.kitsune.launches.model.test_launch_graph import graphs

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


def products(starts_us):
    """A product behind each of some launches that run side by side and end one after the other."""
    spans = [Span(number, 0, NBYTES) for number in range(2 * len(starts_us))]
    launches = [Launch("before", (), (spans[2 * number],)) for number in range(len(starts_us))]
    for number in range(len(starts_us)):
        span = spans[2 * number : 2 * number + 2]
        launches.append(Launch("product", (span[0],), (span[1],), keeps_workspace=True))
    return LaunchGraph.of(launches, [Storage(NBYTES, True, True)] * len(spans)), [*starts_us, *[0.5] * len(starts_us)]
