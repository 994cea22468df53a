"""Planned: what may be done with a recorded step: which launches go on which streams, and the memory that they need."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from kitsune.device.backend import few_multiprocessors
from kitsune.launches.execution.launch_costs import measured_us
from kitsune.launches.model.launch_graph import LaunchGraph
from kitsune.launches.model.recording import Recording
from kitsune.launches.model.step_state import State
from kitsune.launches.planning.memory_plan import MemoryPlan, plan_memory
from kitsune.launches.planning.schedule import (
    Schedule,
    along_critical_path,
    in_order,
    just_in_time,
    on_streams,
    when_needed,
)
from kitsune.launches.planning.trace_export import svg_of, timeline_of, touched_of, trace_of
from kitsune.launches.transforms.renaming import renamed
from kitsune.launches.transforms.splitting import split
from kitsune.timeline import Timeline

#: The most that one of the buckets of parameters may hold that are updated apart. 24 MiB of fp32 are the 96 blocks that
#: 48 multiprocessors of an H200 hold at once; in probes there they were better for ViT-B/16 on 4 images and for
#: BERT-base on 2 sequences, and 32 MiB for ResNet-18. Of 64 MiB, a layer of BERT-base was a kernel of 118 blocks: 22 of
#: them began when the others had ended. Buckets of 4 MiB take BERT-base three times as long as all at once.
BUCKETS_BYTES: Final = (2**25, 3 * 2**23)
MORE: Final = 5  # several streams may make a fifth of the step more, parameters and optimizer state counted in
LEAST_MORE_BYTES: Final = 2**25
WORKSPACE_BYTES: Final = 2**25  # cuBLAS takes as much for every stream on an H200, which no plan counts
#: How many more of these a plain graph comes with than ours on one stream. A whole step: one for the backward, which
#: has a thread of its own there, and two that the steps before it left on both threads. Forward or backward alone: one.
OF_A_STEP: Final = 3
OF_A_HALF: Final = 1
TAKEN_MORE: Final = 4  # with workspaces and what the allocator cannot fill a quarter more, by what was really taken
WAIT_US: Final = 1.5  # an event between two streams of a CUDA graph on an H200
MOST_URGENT: Final = 3  # torch makes streams of four priorities
USUAL_STREAMS: Final = 4
#: How long before the last moment what is held back may begin. On an H200 20 us were better than 60 and 150 us.
LEAD_US: Final = 20.0

#: What each launch of a recording takes, in us.
Costs = Callable[[Recording], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Planned:
    """What was decided for a step: what it launches, when and where, and the memory that it needs.

    `name` says in words by which rule. `priorities` of the streams, if any: kernels of a lower one go first where the
    GPU is full. `multiprocessors`, if any: how many of the GPU's each stream may use, 0 for all.
    """

    name: str
    recording: Recording
    costs_us: Sequence[float]
    schedule: Schedule
    memory: MemoryPlan
    priorities: tuple[int, ...] = ()
    multiprocessors: tuple[int, ...] = ()

    def timeline(self, told: str = "", at_most: int | None = None) -> Timeline:
        """As data; of more than `at_most` launches those that take longest."""
        return timeline_of(self.recording.graph, self.schedule, self.memory, told, at_most)

    def save_trace(self, path: str | Path) -> None:
        """As JSON that Perfetto opens (https://ui.perfetto.dev)."""
        trace = trace_of(self.timeline(self.name), touched_of(self.recording.graph, self.schedule))
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def save_svg(self, path: str | Path) -> None:
        Path(path).write_text(svg_of(self.recording.graph, self.schedule), encoding="utf-8")


def costs_of(recording: Recording) -> list[float]:
    """In us, with the state of the step put back."""
    with State(recording):
        return measured_us(recording)


def plans(recording: Recording, streams: int, pool_bytes: int | None, costs: Costs = costs_of) -> list[Planned]:
    """The `candidates` that fit into a pool, None: one by `budget_of`. When nothing fits, what needs the least."""
    return fitting(candidates(recording, streams, costs), pool_bytes)


def candidates(recording: Recording, streams: int, costs: Costs = costs_of) -> list[Planned]:
    """Ways to issue a recorded step on 1 to `streams` streams, the step as it was on a single one first.

    Leaves the state of the step as it was. Raises CaptureError when its launches cannot be timed.
    """
    alone_us = costs(recording)
    alone = planned("as recorded", recording, alone_us, in_order(recording.graph, alone_us))
    if streams == 1:
        return [alone]
    return [alone, *in_turn([named(name, way, streams, costs) for name, way in ways(recording).items()])]


def fitting(found: Sequence[Planned], pool_bytes: int | None) -> list[Planned]:
    """See `plans`; the first of them is the step as it was recorded."""
    budget_bytes = budget_of(found[0], pool_bytes)
    small = [plan for plan in found if plan.memory.peak_bytes <= budget_bytes]
    return small or [too_large(min(found, key=lambda plan: plan.memory.peak_bytes), budget_bytes)]


def named(name: str, way: Recording, streams: int, costs: Costs) -> list[Planned]:
    return [replace(plan, name=f"{plan.name}; {name}") for plan in spread(way, costs(way), streams)]


def in_turn(lists: Iterable[Sequence[Planned]]) -> list[Planned]:
    """The first of each list, then the second of each, and so on."""
    return [plan for those in zip_longest(*lists) for plan in those if plan is not None]


def too_large(plan: Planned, pool_bytes: int) -> Planned:
    """The same, with a name that says that it does not fit."""
    needed, given = (nbytes / 2**20 for nbytes in (plan.memory.peak_bytes, pool_bytes))
    return replace(plan, name=f"{plan.name}, which takes {needed:.1f} MiB: no plan fits into a pool of {given:.1f} MiB")


def planned(
    name: str, recording: Recording, costs_us: Sequence[float], schedule: Schedule, priorities: tuple[int, ...] = ()
) -> Planned:
    return Planned(name, recording, costs_us, schedule, plan_memory(recording.graph, schedule), priorities)


def ways(recording: Recording) -> dict[str, Recording]:
    """The step in more and smaller launches, with memory of its own for every value, by how it was split."""
    apart = renamed(recording)
    found = {f"updates in buckets of {nbytes >> 20} MiB": split(apart, nbytes) for nbytes in BUCKETS_BYTES}
    last = {way.graph.launches: name for name, way in found.items()}  # few parameters are split in one way only
    return {name: found[name] for name in last.values()}


def spread(way: Recording, costs_us: Sequence[float], streams: int) -> Iterator[Planned]:
    """On several streams: as early as may be, without and with priorities; with the critical path first, and all else
    early, or as late as may be; with what ends the step on streams of its own besides, and all else when it is needed,
    also with what the critical path reads on streams of its own.
    What was the best for most models is first: the contest may end before it has come to all."""
    usual = min(streams, USUAL_STREAMS)
    counts = tuple(dict.fromkeys((usual, streams)))
    early = [as_early(way, costs_us, count) for count in dict.fromkeys((usual, 2))]
    early = [plan for plan in early if plan.schedule.streams > 1]
    late = just_in_time(way.graph, costs_us, LEAD_US)
    needed = when_needed(way.graph, costs_us, LEAD_US)
    yield from early[:1]
    yield path_first(way, costs_us, late, usual, "as late as may be")
    if usual > 2:
        yield from (with_ends_apart(way, costs_us, needed, count) for count in reversed(counts))
    if usual == USUAL_STREAMS:
        feeds = ((count, 1 if count < 6 else 2) for count in reversed(counts))
        yield from (with_ends_apart(way, costs_us, needed, count, for_feeds) for count, for_feeds in feeds)
    yield path_first(way, costs_us, way.graph, usual, "as early as may be")
    yield from early[1:]
    yield from (busiest_first(plan) for plan in early[:1])
    more = (as_early(way, costs_us, count) for count in range(usual + 1, min(streams, usual + 2) + 1))
    yield from (busiest_first(plan) for plan in more if plan.schedule.streams > 1)
    for count in counts[1:]:
        yield path_first(way, costs_us, late, count, "as late as may be")
        yield path_first(way, costs_us, way.graph, count, "as early as may be")


def as_early(way: Recording, costs_us: Sequence[float], count: int) -> Planned:
    schedule = on_streams(way.graph, costs_us, count, WAIT_US)
    return planned(f"each launch as early as may be on {count} streams", way, costs_us, schedule)


def busiest_first(plan: Planned) -> Planned:
    return replace(plan, name=f"{plan.name}, the busiest one first", priorities=by_load(plan.schedule))


def path_first(way: Recording, costs_us: Sequence[float], graph: LaunchGraph, count: int, rest: str) -> Planned:
    name = f"the critical path first on {count} streams, all else {rest}"
    return planned(name, way, costs_us, along_critical_path(graph, costs_us, count, WAIT_US), first_first(count))


def with_ends_apart(
    way: Recording, costs_us: Sequence[float], needed: LaunchGraph, count: int, for_feeds: int = 0
) -> Planned:
    """What ends the step, which is mostly updates, on one or two streams of its own, behind all else, and on few
    multiprocessors where the GPU can be divided: the blocks of an update take 50 us each, and a matrix product on an
    H200 needs a multiprocessor that is empty, or eight of them side by side.

    What the critical path reads may have streams of its own, as urgent as it is: in ResNet-50 sums of 1 us for a batch
    norm, for which the path waits, stood behind gradients of weights that take up to 20 us.
    """
    for_ends = 1 if count <= USUAL_STREAMS else 2
    few = few_multiprocessors(way.device)
    parts = (*[0] * (count - for_ends), *[few] * for_ends) if few else ()
    fed = f"what it reads on {for_feeds} of them, " if for_feeds else ""
    where = f"on {for_ends} of them" + (f" and {few} multiprocessors" if few else "")
    name = f"the critical path first on {count} streams, {fed}what ends the step {where}, all else when it is needed"
    schedule = along_critical_path(needed, costs_us, count, WAIT_US, for_feeds=for_feeds, for_ends=for_ends)
    priorities = first_first(count, for_ends, for_feeds)
    return replace(planned(name, way, costs_us, schedule, priorities), multiprocessors=parts)


def by_load(schedule: Schedule) -> tuple[int, ...]:
    """A priority for each stream, as CUDA counts them: 0 for the least busy, and lower, down to -3, is more urgent."""
    busy_us = [0.0] * schedule.streams
    for placed in schedule.placed:
        busy_us[placed.stream] += placed.end_us - placed.begin_us
    ranks = sorted(range(schedule.streams), key=lambda stream: busy_us[stream])
    return tuple(-min(ranks.index(stream), MOST_URGENT) for stream in range(schedule.streams))


def first_first(streams: int, last: int = 0, beside: int = 0) -> tuple[int, ...]:
    """Priorities by which the first stream and those `beside` it go before all others, and so many of the last ones
    behind them."""
    first = 1 + beside
    return (*[-MOST_URGENT] * first, *[-1 if last else 0] * (streams - first - last), *[0] * last)


def budget_of(alone: Planned, pool_bytes: int | None) -> int:
    """What the pool of several streams may take, as planned: what somebody said, or that of one and a share of all."""
    if pool_bytes is not None:
        return pool_bytes
    alone_bytes = alone.memory.peak_bytes
    return alone_bytes + max((held_bytes(alone.recording) + alone_bytes) // MORE, LEAST_MORE_BYTES)


def most_taken(recording: Recording, alone_bytes: int, workspaces: int) -> int:
    """What the graph of several streams may take, where that of the recorded order on one takes `alone_bytes`.

    A quarter of all that is there with a plain graph, of which that one has `workspaces` more. Without this bound DLRM
    on eight streams took 1.52 times as much, for 1 % less time than on four.
    """
    plain_bytes = alone_bytes + workspaces * WORKSPACE_BYTES
    return plain_bytes + (held_bytes(recording) + plain_bytes) // TAKEN_MORE


def held_bytes(recording: Recording) -> int:
    """Of what was there before the step: parameters, the optimizer's state, the batch."""
    return sum(storage.nbytes() for storage in recording.held.values())
