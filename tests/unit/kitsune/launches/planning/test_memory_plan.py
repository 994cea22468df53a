from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage
from kitsune.launches.planning.memory_plan import MemoryPlan, plan_memory
from kitsune.launches.planning.schedule import Placed, Schedule, in_order
from tests.unit.kitsune.launches.model.test_launch_graph import touchers
from tests.unit.kitsune.launches.planning.schedules import Case, Problem, ended_before, problems, schedules

BLOCK_BYTES = 512
quick = settings(max_examples=200)

Tenancy = tuple[int, int]


def rounded(nbytes: int) -> int:
    return (nbytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def position_of(schedule: Schedule, launch: int) -> int:
    return [placed.launch for placed in schedule.placed].index(launch)


def made(graph: LaunchGraph) -> dict[int, list[int]]:
    """The storages that a launch of the step makes, each with the launches that touch it; the first one makes it."""
    found = {number: touchers(graph, number) for number, storage in enumerate(graph.storages) if storage.is_own}
    return {number: launches for number, launches in found.items() if launches}


def stream_of(schedule: Schedule, storage: int, graph: LaunchGraph) -> int:
    return schedule.placed[position_of(schedule, made(graph)[storage][0])].stream


def let_go_at(plan: MemoryPlan, storage: int) -> int | None:
    return next((position for position, released in enumerate(plan.releases) if storage in released), None)


class Allocator:
    """A stream's memory as torch manages it: freed bytes go to the next that fits, lowest or highest address first."""

    def __init__(self, is_lowest: bool) -> None:
        self.is_lowest = is_lowest
        self.live: dict[int, tuple[int, int]] = {}
        self.tenants: list[tuple[int, int, int]] = []
        self.top = 0

    def allocate(self, storage: int, nbytes: int) -> Iterator[int]:
        """Yields the former tenants of the bytes that are handed out."""
        begin, end = self.place(rounded(nbytes))
        self.top = max(self.top, end)
        self.live[storage] = begin, end
        yield from (old for old, its_begin, its_end in self.tenants if max(begin, its_begin) < min(end, its_end))
        self.tenants.append((storage, begin, end))

    def place(self, nbytes: int) -> tuple[int, int]:
        starts = {0, self.top, *(end for _, end in self.live.values()), *(b - nbytes for b, _ in self.live.values())}
        free = [
            begin
            for begin in starts
            if begin >= 0
            and all(begin + nbytes <= its_begin or its_end <= begin for its_begin, its_end in self.live.values())
        ]
        inside = [begin for begin in free if begin + nbytes <= self.top]
        begin = min(free) if self.is_lowest or not inside else max(inside)
        return begin, begin + nbytes


def reuses(graph: LaunchGraph, schedule: Schedule, plan: MemoryPlan, is_lowest: bool) -> Iterator[Tenancy]:
    """Plays the step on the host and gives every (former tenant, new tenant) of the same bytes."""
    pools = [Allocator(is_lowest) for _ in range(schedule.streams)]
    streams = {storage: stream_of(schedule, storage, graph) for storage in made(graph)}
    makers = {storage: launches[0] for storage, launches in made(graph).items()}
    for position, placed in enumerate(schedule.placed):
        for storage in plan.releases[position]:
            del pools[streams[storage]].live[storage]
        for storage in (storage for storage, maker in makers.items() if maker == placed.launch):
            former = pools[placed.stream].allocate(storage, graph.storages[storage].nbytes)
            yield from ((old, storage) for old in former)


def chain_of_buffers(count: int, nbytes: int = 1000) -> LaunchGraph:
    """Every launch reads what the one before made, and makes a storage of its own."""
    spans = [Span(number, 0, nbytes) for number in range(count)]
    launches = [Launch("op", tuple(spans[max(0, n - 1) : n]), (spans[n],)) for n in range(count)]
    return LaunchGraph.of(launches, [Storage(nbytes, is_own=True, is_kept=False)] * count)


def placed_on(*streams_and_waits: tuple[int, tuple[int, ...]]) -> Schedule:
    """A schedule in recorded order, by hand."""
    placed = [Placed(n, stream, waits, 0.0, 0.0) for n, (stream, waits) in enumerate(streams_and_waits)]
    return Schedule(1 + max(stream for stream, _ in streams_and_waits), tuple(placed))


# Safe -----------------------------------------------------------------------------------------------------------------


@quick
@given(schedules(), st.booleans())
def test_former_tenants_are_done_before_new_ones_begin(case: Case, is_lowest: bool) -> None:
    graph, schedule = case
    before, touched = ended_before(schedule), made(graph)
    for old, new in reuses(graph, schedule, plan_memory(graph, schedule), is_lowest):
        assert all(first in before[second] for first in touched[old] for second in touched[new])


@quick
@given(schedules())
def test_no_launch_could_be_given_memory_that_is_still_in_use(case: Case) -> None:
    """Stricter than any allocator: every launch of the stream from the release on may take the memory."""
    graph, schedule = case
    plan, before = plan_memory(graph, schedule), ended_before(schedule)
    for storage, launches in made(graph).items():
        position, stream = let_go_at(plan, storage), stream_of(schedule, storage, graph)
        for placed in schedule.placed[position:] if position is not None else ():
            assert placed.launch not in launches
            assert placed.stream != stream or before[placed.launch].issuperset(launches)


@quick
@given(schedules())
def test_storages_are_let_go_of_once_and_kept_ones_never(case: Case) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule)
    released = [storage for at_once in plan.releases for storage in at_once]
    assert len(plan.releases) == len(graph.launches) + 1
    assert sorted(released) == [n for n, storage in enumerate(graph.storages) if storage.is_own and not storage.is_kept]


@quick
@given(schedules())
def test_no_storage_could_be_let_go_of_earlier(case: Case) -> None:
    graph, schedule = case
    plan, before = plan_memory(graph, schedule), ended_before(schedule)
    for storage, launches in made(graph).items():
        if graph.storages[storage].is_kept:
            continue
        stream = stream_of(schedule, storage, graph)
        issued = 1 + max(position_of(schedule, launch) for launch in launches)
        for placed in schedule.placed[issued : let_go_at(plan, storage)]:
            assert placed.stream != stream or not before[placed.launch].issuperset(launches)


# Small ----------------------------------------------------------------------------------------------------------------


@quick
@given(problems)
def test_on_one_stream_the_peak_is_what_lives_at_once(problem: Problem) -> None:
    graph, costs_us = problem
    lives = {
        storage: range(launches[0], len(graph.launches) if graph.storages[storage].is_kept else launches[-1] + 1)
        for storage, launches in made(graph).items()
    }
    needed = [
        sum(rounded(graph.storages[storage].nbytes) for storage, life in lives.items() if launch in life)
        for launch in range(len(graph.launches))
    ]
    assert plan_memory(graph, in_order(graph, costs_us)).peak_bytes == max([0, *needed])


@quick
@given(schedules())
def test_the_peak_is_the_sum_of_what_lives_at_once_on_every_stream(case: Case) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule)
    lives = [
        (stream_of(schedule, storage, graph), position_of(schedule, launches[0]), let_go_at(plan, storage), storage)
        for storage, launches in made(graph).items()
    ]
    peaks_bytes = [0] * schedule.streams
    for position in range(len(schedule.placed)):
        used_bytes = [0] * schedule.streams
        for stream, begin, end, storage in lives:
            if begin <= position and (end is None or position < end):
                used_bytes[stream] += rounded(graph.storages[storage].nbytes)
        peaks_bytes = list(map(max, peaks_bytes, used_bytes))
    assert plan.peak_bytes == sum(peaks_bytes)


@quick
@given(schedules())
def test_the_peak_is_at_most_what_it_takes_without_reuse(case: Case) -> None:
    graph, schedule = case
    plan = plan_memory(graph, schedule)
    assert plan.naive_bytes == sum(rounded(storage.nbytes) for storage in graph.storages if storage.is_own)
    assert plan.peak_bytes <= plan.naive_bytes


# By hand --------------------------------------------------------------------------------------------------------------


def test_a_chain_needs_two_buffers() -> None:
    graph = chain_of_buffers(4)
    plan = plan_memory(graph, in_order(graph, [1.0] * 4))
    assert plan == MemoryPlan(releases=((), (), (0,), (1,), (2, 3)), peak_bytes=2 * 1024, naive_bytes=4 * 1024)


def test_what_another_stream_reads_is_held_until_its_own_stream_has_waited_for_that() -> None:
    graph = chain_of_buffers(2)
    extra = [Launch("extra", (), (Span(2, 0, 8),)), Launch("join", (Span(1, 0, 8),), ()), Launch("extra", (), ())]
    graph = LaunchGraph.of([*graph.launches, *extra], [*graph.storages, Storage(8, is_own=True, is_kept=True)])
    schedule = placed_on((0, ()), (1, (0,)), (0, ()), (0, (1,)), (0, ()))
    # Launch 1 on stream 1 reads storage 0 of stream 0, which knows of its end from launch 3 on.
    assert plan_memory(graph, schedule).releases == ((), (), (), (0,), (), (1,))


def test_without_a_wait_back_it_is_held_to_the_end() -> None:
    graph = chain_of_buffers(2)
    graph = LaunchGraph.of([*graph.launches, Launch("extra", (), ())], graph.storages)
    assert plan_memory(graph, placed_on((0, ()), (1, (0,)), (0, ()))).releases == ((), (), (), (0, 1))


def test_what_was_learnt_through_a_third_stream_counts() -> None:
    graph = chain_of_buffers(4)
    schedule = placed_on((0, ()), (1, (0,)), (2, (1,)), (0, (2,)))
    assert plan_memory(graph, schedule).releases == ((), (), (), (0,), (1, 2, 3))


def test_storages_that_were_there_before_are_nobodys_to_free() -> None:
    graph = chain_of_buffers(3)
    graph = LaunchGraph.of(graph.launches, [replace(storage, is_own=False) for storage in graph.storages])
    assert plan_memory(graph, in_order(graph, [1.0] * 3)) == MemoryPlan(((), (), (), ()), 0, 0)
