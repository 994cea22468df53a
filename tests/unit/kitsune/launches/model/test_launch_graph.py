import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.launches.model.launch_graph import Launch, LaunchGraph, Span, Storage

SIZES_BYTES = [0, 4, 4, 512, 516, 1500, 4096]
QUARTERS = [(0, 4)] * 4 + [(0, 2), (2, 4), (1, 3), (0, 1), (3, 4), (0, 0), (2, 2), (4, 4)]
PARAMETER = Storage(16, is_own=False, is_kept=False)
OWN = Storage(16, is_own=True, is_kept=False)

quick = settings(max_examples=200)


def graph_by_chance(storages: int, launches: int, seed: int) -> LaunchGraph:
    """Launches that read and write whole storages or parts of them, in place or not; most are new ones.

    From a seed, since drawing every span from Hypothesis takes most of the time that a test has.
    """
    rng = random.Random(seed)
    there = [Storage(rng.choice(SIZES_BYTES), rng.random() < 0.8, rng.random() < 0.2) for _ in range(storages)]

    def spans(most: int, newest: int) -> tuple[Span, ...]:
        oldest = max(0, newest - rng.choice([2, 3, 3, newest]))
        return tuple(part(rng.randrange(oldest, newest), rng.choice(QUARTERS)) for _ in range(rng.randint(0, most)))

    def part(storage: int, quarters: tuple[int, int]) -> Span:
        begin, end = (there[storage].nbytes * quarter // 4 for quarter in quarters)
        return Span(storage, begin, end)

    issued: list[Launch] = []
    newest = 1
    for _ in range(launches):
        reads, writes = spans(2, newest), spans(2, newest)
        if rng.random() < 0.7 and newest < storages:
            newest, writes = newest + 1, (part(newest, rng.choice(QUARTERS)),)
        issued.append(Launch("op", reads, writes, rng.random() < 0.2))
    return LaunchGraph.of(issued, there)


# Not `st.integers`, which prefers small numbers: short steps hold few hazards.
graphs = st.builds(
    graph_by_chance,
    st.sampled_from([1, 6, 12, 25, 25, 25]),
    st.sampled_from([0, 3, 8, 16, 24, 32, 40, 40]),
    st.integers(0, 2**32),
)


def share_bytes(spans: tuple[Span, ...], others: tuple[Span, ...]) -> bool:
    return any(
        span.storage == other.storage and max(span.begin, other.begin) < min(span.end, other.end)
        for span in spans
        for other in others
    )


@quick
@given(graphs)
def test_who_wrote_what_a_launch_reads(graph: LaunchGraph) -> None:
    """Byte by byte: the last launch before it that wrote that byte."""
    writers: dict[tuple[int, int], int] = {}
    expected: list[set[int]] = []
    for number, launch in enumerate(graph.launches):
        read = {(span.storage, at) for span in launch.reads for at in range(span.begin, span.end)}
        expected.append({writers[byte] for byte in read if byte in writers})
        writers |= {(span.storage, at): number for span in launch.writes for at in range(span.begin, span.end)}
    assert graph.read_from() == expected


def touches(launch: Launch, storage: int) -> bool:
    """Also none of its bytes: the storage must be there."""
    return any(span.storage == storage for span in (*launch.reads, *launch.writes))


def touchers(graph: LaunchGraph, storage: int) -> list[int]:
    return [number for number, launch in enumerate(graph.launches) if touches(launch, storage)]


def ordered_pairs(graph: LaunchGraph) -> set[tuple[int, int]]:
    """Every pair of launches that must stay in order, by the definition, without any cleverness."""
    pairs = {
        (first, second)
        for first, second in combinations(range(len(graph.launches)), 2)
        if share_bytes(graph.launches[first].writes, graph.launches[second].reads)
        or share_bytes(graph.launches[first].reads, graph.launches[second].writes)
        or share_bytes(graph.launches[first].writes, graph.launches[second].writes)
    }
    for number, storage in enumerate(graph.storages):
        if storage.is_own:
            pairs |= {(touchers(graph, number)[0], later) for later in touchers(graph, number)[1:]}
    return pairs


def closure(before: list[set[int]]) -> list[set[int]]:
    """For every launch all that come before it. What is handed in are those directly before, all with lower numbers."""
    found: list[set[int]] = []
    for direct in before:
        found.append(direct.union(*(found[number] for number in direct)))
    return found


def graph_of(*launches: tuple[list[Span], list[Span]], storage: Storage = PARAMETER, count: int = 3) -> LaunchGraph:
    """A graph from pairs of what is read and what is written."""
    return LaunchGraph.of([Launch("op", tuple(reads), tuple(writes)) for reads, writes in launches], [storage] * count)


def whole(storage: int) -> Span:
    return Span(storage, 0, 16)


@quick
@given(graphs)
def test_it_orders_exactly_what_must_be_ordered(graph: LaunchGraph) -> None:
    needed: list[set[int]] = [set() for _ in graph.launches]
    for first, second in ordered_pairs(graph):
        needed[second].add(first)
    assert closure([set(after) for after in graph.after]) == closure(needed)


@quick
@given(graphs)
def test_no_edge_is_implied_by_the_others(graph: LaunchGraph) -> None:
    before = closure([set(after) for after in graph.after])
    for after in graph.after:
        assert list(after) == sorted(set(after))
        assert not any(first in before[second] for first in after for second in after)


@quick
@given(graphs)
def test_launches_that_draw_are_issued_after_each_other(graph: LaunchGraph) -> None:
    drawing = [number for number, launch in enumerate(graph.launches) if launch.draws]
    expected = {second: (first,) for first, second in pairwise(drawing)}
    assert graph.issued_after == tuple(expected.get(number, ()) for number in range(len(graph.launches)))


@quick
@given(graphs)
def test_touchers_are_the_launches_that_name_a_storage(graph: LaunchGraph) -> None:
    assert graph.touchers() == tuple(tuple(touchers(graph, number)) for number in range(len(graph.storages)))


def test_readers_wait_for_the_writer_and_not_for_each_other() -> None:
    graph = graph_of(([], [whole(0)]), ([whole(0)], [whole(1)]), ([whole(0)], [whole(2)]), ([], [whole(0)]))
    assert graph.after == ((), (0,), (0,), (1, 2))


def test_parts_that_do_not_overlap_are_independent() -> None:
    graph = graph_of(([], [Span(0, 0, 8)]), ([], [Span(0, 8, 16)]), ([Span(0, 4, 8)], []), ([Span(0, 7, 9)], []))
    assert graph.after == ((), (), (0,), (0, 1))


def test_a_write_over_the_middle_leaves_the_writer_of_both_ends() -> None:
    graph = graph_of(([], [whole(0)]), ([], [Span(0, 4, 8)]), ([Span(0, 0, 4)], []), ([Span(0, 8, 16)], []))
    assert graph.after == ((), (0,), (0,), (0,))


def test_readers_of_a_part_hold_up_writers_of_that_part_only() -> None:
    graph = graph_of(([Span(0, 0, 8)], []), ([], [Span(0, 8, 16)]), ([], [Span(0, 6, 7)]))
    assert graph.after == ((), (), (0,))


def test_a_launch_in_place_does_not_wait_for_itself() -> None:
    graph = graph_of(([whole(0)], [whole(0)]), ([whole(0)], [whole(0), Span(0, 4, 12)]))
    assert graph.after == ((), (0,))


def test_of_what_has_no_bytes_only_the_storage_must_be_there() -> None:
    launches = ([], [Span(0, 4, 4)]), ([Span(0, 4, 4)], [whole(0)]), ([], [Span(0, 16, 16)])
    assert graph_of(*launches, storage=PARAMETER).after == ((), (), ())
    assert graph_of(*launches, storage=OWN).after == ((), (0,), (0,))


def test_nothing_touches_an_own_storage_before_the_launch_that_makes_it() -> None:
    halves = ([], [Span(0, 0, 8)]), ([], [Span(0, 8, 16)]), ([Span(0, 8, 16)], [])
    assert graph_of(*halves, storage=PARAMETER).after == ((), (), (1,))
    assert graph_of(*halves, storage=OWN).after == ((), (0,), (1,))


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span(1, 0, 4), r"launch 0 \(op\) names storage 1, but there are only 1"),
        (Span(-1, 0, 4), "names storage -1"),
        (Span(0, 0, 17), r"touches bytes 0 to 17 of storage 0 \(16 B\)"),
        (Span(0, -1, 4), "touches bytes -1 to 4"),
        (Span(0, 8, 4), "touches bytes 8 to 4"),
    ],
)
@pytest.mark.parametrize("is_read", [True, False])
def test_a_span_that_is_not_there_is_refused(span: Span, message: str, is_read: bool) -> None:
    launch = Launch("op", (span,) if is_read else (), () if is_read else (span,))
    with pytest.raises(ValueError, match=message):
        LaunchGraph.of([launch], [OWN])


@pytest.mark.parametrize("nbytes", [-4, "4", 4.0, True, None])
def test_a_size_that_no_storage_has_is_refused(nbytes: object) -> None:
    with pytest.raises(ValueError, match=r"storage 0 cannot have .* bytes"):
        LaunchGraph.of([], [Storage(nbytes, True, False)])
