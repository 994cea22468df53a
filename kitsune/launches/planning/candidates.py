"""Candidates: schedules of a step on several streams, by several rules, with their memory plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kitsune.launches.model.launch_graph import LaunchGraph
from kitsune.launches.planning.memory_plan import MemoryPlan, plan_memory
from kitsune.launches.planning.schedule import (
    Schedule,
    along_critical_path,
    in_order,
    just_in_time,
    on_streams,
    when_needed,
)

WAIT_US: Final = 1.5  # cost of an event between two streams of a CUDA graph on an H200
MOST_URGENT: Final = 3  # torch has streams of four priorities, 0 to -3
USUAL_STREAMS: Final = 4
#: How long before its last moment a launch that is held back may begin. On an H200 20 us was better than 60 and 150 us.
LEAD_US: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule of a step's launches, and its memory plan. `costs_us`: the time of each launch alone.

    `name` says in words by which rule it was made. `priorities`, if any: one for each stream; when the GPU is full,
    kernels of the lower number go first. `multiprocessors`, if any: how many each stream may use, 0 for all.
    """

    name: str
    costs_us: Sequence[float]
    schedule: Schedule
    memory: MemoryPlan
    priorities: tuple[int, ...] = ()
    multiprocessors: tuple[int, ...] = ()


def recorded_order(graph: LaunchGraph, costs_us: Sequence[float]) -> Candidate:
    """The recorded order on one stream."""
    return Rules(graph, costs_us).candidate("as recorded", in_order(graph, costs_us))


def candidates(graph: LaunchGraph, costs_us: Sequence[float], streams: int, few: int = 0) -> Iterator[Candidate]:
    """The candidates on several streams that docs/streams-design.md lists under "Candidates".

    Those that were best for most models come first, because the race may end before it has tried all. `few`: how many
    multiprocessors updates may use where the GPU can be divided, 0 where it cannot.
    """
    rules = Rules(graph, costs_us, few)
    usual = min(streams, USUAL_STREAMS)
    counts = tuple(dict.fromkeys((usual, streams)))
    early = [rules.as_early(count) for count in dict.fromkeys((usual, 2))]
    early = [plan for plan in early if plan.schedule.streams > 1]
    late = just_in_time(graph, costs_us, LEAD_US)
    needed = when_needed(graph, costs_us, LEAD_US)
    yield from early[:1]
    yield rules.path_first(late, usual, "as late as may be")
    if usual > 2:
        yield from (rules.with_ends_apart(needed, count) for count in reversed(counts))
    if usual == USUAL_STREAMS:
        feeds = ((count, 1 if count < 6 else 2) for count in reversed(counts))
        yield from (rules.with_ends_apart(needed, count, for_feeds) for count, for_feeds in feeds)
    yield rules.path_first(graph, usual, "as early as may be")
    yield from early[1:]
    yield from (busiest_first(plan) for plan in early[:1])
    more = (rules.as_early(count) for count in range(usual + 1, min(streams, usual + 2) + 1))
    yield from (busiest_first(plan) for plan in more if plan.schedule.streams > 1)
    for count in counts[1:]:
        yield rules.path_first(late, count, "as late as may be")
        yield rules.path_first(graph, count, "as early as may be")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which candidates of one step are made. `few` as for `candidates`."""

    graph: LaunchGraph
    costs_us: Sequence[float]
    few: int = 0

    def as_early(self, count: int) -> Candidate:
        schedule = on_streams(self.graph, self.costs_us, count, WAIT_US)
        return self.candidate(f"each launch as early as may be on {count} streams", schedule)

    def path_first(self, graph: LaunchGraph, count: int, rest: str) -> Candidate:
        """`graph` is the step's, or one that holds launches back; `rest` says in words when all else runs."""
        schedule = along_critical_path(graph, self.costs_us, count, WAIT_US)
        name = f"the critical path first on {count} streams, all else {rest}"
        return self.candidate(name, schedule, stream_priorities(count))

    def with_ends_apart(self, needed: LaunchGraph, count: int, for_feeds: int = 0) -> Candidate:
        """The launches that end the step, mostly updates, on one or two streams of their own at the lowest priority.

        They use few multiprocessors where the GPU can be divided: the blocks of an update take 50 us each, and a matrix
        product on an H200 needs a multiprocessor that is empty, or eight of them side by side.

        With `for_feeds`, the inputs of the critical path have that many streams of their own, as urgent as the path: in
        ResNet-50, sums of 1 us for a batch norm, which the path needs, stood behind weight gradients of up to 20 us.
        """
        for_ends = 1 if count <= USUAL_STREAMS else 2
        parts = (*[0] * (count - for_ends), *[self.few] * for_ends) if self.few else ()
        fed = f"what it reads on {for_feeds} of them, " if for_feeds else ""
        where = f"on {for_ends} of them" + (f" and {self.few} multiprocessors" if self.few else "")
        name = (
            f"the critical path first on {count} streams, {fed}what ends the step {where}, all else when it is needed"
        )
        schedule = along_critical_path(needed, self.costs_us, count, WAIT_US, for_feeds=for_feeds, for_ends=for_ends)
        priorities = stream_priorities(count, for_ends, for_feeds)
        return replace(self.candidate(name, schedule, priorities), multiprocessors=parts)

    def candidate(self, name: str, schedule: Schedule, priorities: tuple[int, ...] = ()) -> Candidate:
        memory = plan_memory(self.graph, schedule)
        return Candidate(name=name, costs_us=self.costs_us, schedule=schedule, memory=memory, priorities=priorities)


def busiest_first(plan: Candidate) -> Candidate:
    return replace(plan, name=f"{plan.name}, the busiest one first", priorities=by_load(plan.schedule))


def by_load(schedule: Schedule) -> tuple[int, ...]:
    """A CUDA priority for each stream by its load: 0 for the least busy, down to -3 (most urgent) for the busiest."""
    busy_us = [0.0] * schedule.streams
    for placed in schedule.placed:
        busy_us[placed.stream] += placed.end_us - placed.begin_us
    ranks = sorted(range(schedule.streams), key=lambda stream: busy_us[stream])
    return tuple(-min(ranks.index(stream), MOST_URGENT) for stream in range(schedule.streams))


def stream_priorities(streams: int, last: int = 0, beside: int = 0) -> tuple[int, ...]:
    """Priorities: the first stream and the `beside` next ones are most urgent, and the `last` ones are least urgent."""
    first = 1 + beside
    return (*[-MOST_URGENT] * first, *[-1 if last else 0] * (streams - first - last), *[0] * last)
