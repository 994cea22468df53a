"""Candidate stream schedules of a recorded step, with their memory plans."""

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

#: Maximum sizes of a bucket of parameters that one launch updates. 24 MiB of fp32 are the 96 blocks that 48
#: multiprocessors of an H200 hold at once; in probes there 24 MiB was better for ViT-B/16 on 4 images and for BERT-base
#: on 2 sequences, and 32 MiB for ResNet-18. With 64 MiB, a layer of BERT-base was one kernel of 118 blocks, of which 22
#: began only when the others had ended. With 4 MiB, the update of BERT-base takes three times as long as in one launch.
BUCKETS_BYTES: Final = (2**25, 3 * 2**23)
EXTRA_DIVISOR: Final = 5  # several streams may need a fifth of the whole step more, with parameters and optimizer state
MIN_EXTRA_BYTES: Final = 2**25
WORKSPACE_BYTES: Final = 2**25  # cuBLAS takes this much for every stream on an H200; plans do not count it
#: How many more workspaces a plain graph has than the planner's on one stream. For a whole step, one for the backward,
#: which runs on a thread of its own there, and two left by earlier steps on both threads. Forward or backward alone: 1.
WORKSPACES_OF_STEP: Final = 3
WORKSPACES_OF_HALF: Final = 1
TAKEN_DIVISOR: Final = 4  # a quarter more as measured, with workspaces and what the allocator cannot fill
WAIT_US: Final = 1.5  # cost of an event between two streams of a CUDA graph on an H200
MOST_URGENT: Final = 3  # torch has streams of four priorities, 0 to -3
USUAL_STREAMS: Final = 4
#: How long before its last moment a launch that is held back may begin. On an H200 20 us was better than 60 and 150 us.
LEAD_US: Final = 20.0

#: Times each launch of a recording alone, in us.
Costs = Callable[[Recording], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate for a step: its launches, their schedule, and their memory plan.

    `name` says in words by which rule it was made; the timing cache finds the last winner by it. `priorities`, if any:
    one for each stream; when the GPU is full, kernels of the lower number go first. `multiprocessors`, if any: how many
    each stream may use, 0 for all.
    """

    name: str
    recording: Recording
    costs_us: Sequence[float]
    schedule: Schedule
    memory: MemoryPlan
    priorities: tuple[int, ...] = ()
    multiprocessors: tuple[int, ...] = ()

    def timeline(self, told: str = "", at_most: int | None = None) -> Timeline:
        """The timeline as data. With `at_most`, only that many of the longest launches."""
        return timeline_of(self.recording.graph, self.schedule, self.memory, told, at_most)

    def save_trace(self, path: str | Path) -> None:
        """Writes a JSON trace for Perfetto (https://ui.perfetto.dev)."""
        trace = trace_of(self.timeline(self.name), touched_of(self.recording.graph, self.schedule))
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def save_svg(self, path: str | Path) -> None:
        Path(path).write_text(svg_of(self.recording.graph, self.schedule), encoding="utf-8")


def costs_of(recording: Recording) -> list[float]:
    """The measured time of each launch in us. The step's state is restored."""
    with State(recording):
        return measured_us(recording)


def plans(recording: Recording, streams: int, pool_bytes: int | None, costs: Costs = costs_of) -> list[Planned]:
    """The `candidates` that fit into a pool of `pool_bytes`, or of `budget_of` if that is None.

    If none fits, only the one that needs the least memory, with a note in its name.
    """
    return fitting(candidates(recording, streams, costs), pool_bytes)


def candidates(recording: Recording, streams: int, costs: Costs = costs_of) -> list[Planned]:
    """Plans for a recorded step on 1 to `streams` streams. The first is the recorded order on one stream.

    The step's state is restored. Raises CaptureError when its launches cannot be timed.
    """
    alone_us = costs(recording)
    alone = planned("as recorded", recording, alone_us, in_order(recording.graph, alone_us))
    if streams == 1:
        return [alone]
    return [
        alone,
        *interleaved(
            [named_candidates(name, variant, streams, costs) for name, variant in variants(recording).items()]
        ),
    ]


def fitting(found: Sequence[Planned], pool_bytes: int | None) -> list[Planned]:
    """As `plans`, for plans that were made before. The first of `found` must be the recorded order on one stream."""
    budget_bytes = budget_of(found[0], pool_bytes)
    small = [plan for plan in found if plan.memory.peak_bytes <= budget_bytes]
    return small or [with_size_note(min(found, key=lambda plan: plan.memory.peak_bytes), budget_bytes)]


def named_candidates(name: str, variant: Recording, streams: int, costs: Costs) -> list[Planned]:
    return [replace(plan, name=f"{plan.name}; {name}") for plan in spread(variant, costs(variant), streams)]


def interleaved(lists: Iterable[Sequence[Planned]]) -> list[Planned]:
    """The first of each list, then the second of each, and so on."""
    return [plan for those in zip_longest(*lists) for plan in those if plan is not None]


def with_size_note(plan: Planned, pool_bytes: int) -> Planned:
    """Copy whose name says that it does not fit."""
    needed, given = (nbytes / 2**20 for nbytes in (plan.memory.peak_bytes, pool_bytes))
    return replace(plan, name=f"{plan.name}, which takes {needed:.1f} MiB: no plan fits into a pool of {given:.1f} MiB")


def planned(
    name: str, recording: Recording, costs_us: Sequence[float], schedule: Schedule, priorities: tuple[int, ...] = ()
) -> Planned:
    return Planned(name, recording, costs_us, schedule, plan_memory(recording.graph, schedule), priorities)


def variants(recording: Recording) -> dict[str, Recording]:
    """The step after renaming and splitting, once for each bucket size, by a name for the split."""
    apart = renamed(recording)
    found = {f"updates in buckets of {nbytes >> 20} MiB": split(apart, nbytes) for nbytes in BUCKETS_BYTES}
    # Steps of few parameters are split alike for all sizes: such variants are listed once.
    last = {variant.graph.launches: name for name, variant in found.items()}
    return {name: found[name] for name in last.values()}


def spread(variant: Recording, costs_us: Sequence[float], streams: int) -> Iterator[Planned]:
    """The candidates on several streams that docs/streams-design.md lists under "Candidates".

    Those that were best for most models come first, because the race may end before it has tried all.
    """
    usual = min(streams, USUAL_STREAMS)
    counts = tuple(dict.fromkeys((usual, streams)))
    early = [as_early(variant, costs_us, count) for count in dict.fromkeys((usual, 2))]
    early = [plan for plan in early if plan.schedule.streams > 1]
    late = just_in_time(variant.graph, costs_us, LEAD_US)
    needed = when_needed(variant.graph, costs_us, LEAD_US)
    yield from early[:1]
    yield path_first(variant, costs_us, late, usual, "as late as may be")
    if usual > 2:
        yield from (with_ends_apart(variant, costs_us, needed, count) for count in reversed(counts))
    if usual == USUAL_STREAMS:
        feeds = ((count, 1 if count < 6 else 2) for count in reversed(counts))
        yield from (with_ends_apart(variant, costs_us, needed, count, for_feeds) for count, for_feeds in feeds)
    yield path_first(variant, costs_us, variant.graph, usual, "as early as may be")
    yield from early[1:]
    yield from (busiest_first(plan) for plan in early[:1])
    more = (as_early(variant, costs_us, count) for count in range(usual + 1, min(streams, usual + 2) + 1))
    yield from (busiest_first(plan) for plan in more if plan.schedule.streams > 1)
    for count in counts[1:]:
        yield path_first(variant, costs_us, late, count, "as late as may be")
        yield path_first(variant, costs_us, variant.graph, count, "as early as may be")


def as_early(variant: Recording, costs_us: Sequence[float], count: int) -> Planned:
    schedule = on_streams(variant.graph, costs_us, count, WAIT_US)
    return planned(f"each launch as early as may be on {count} streams", variant, costs_us, schedule)


def busiest_first(plan: Planned) -> Planned:
    return replace(plan, name=f"{plan.name}, the busiest one first", priorities=by_load(plan.schedule))


def path_first(variant: Recording, costs_us: Sequence[float], graph: LaunchGraph, count: int, rest: str) -> Planned:
    name = f"the critical path first on {count} streams, all else {rest}"
    return planned(
        name, variant, costs_us, along_critical_path(graph, costs_us, count, WAIT_US), stream_priorities(count)
    )


def with_ends_apart(
    variant: Recording, costs_us: Sequence[float], needed: LaunchGraph, count: int, for_feeds: int = 0
) -> Planned:
    """The launches that end the step, mostly updates, on one or two streams of their own at the lowest priority.

    They use few multiprocessors where the GPU can be divided: the blocks of an update take 50 us each, and a matrix
    product on an H200 needs a multiprocessor that is empty, or eight of them side by side.

    With `for_feeds`, the inputs of the critical path have that many streams of their own, as urgent as the path: in
    ResNet-50, sums of 1 us for a batch norm, which the path needs, stood behind weight gradients of up to 20 us.
    """
    for_ends = 1 if count <= USUAL_STREAMS else 2
    few = few_multiprocessors(variant.device)
    parts = (*[0] * (count - for_ends), *[few] * for_ends) if few else ()
    fed = f"what it reads on {for_feeds} of them, " if for_feeds else ""
    where = f"on {for_ends} of them" + (f" and {few} multiprocessors" if few else "")
    name = f"the critical path first on {count} streams, {fed}what ends the step {where}, all else when it is needed"
    schedule = along_critical_path(needed, costs_us, count, WAIT_US, for_feeds=for_feeds, for_ends=for_ends)
    priorities = stream_priorities(count, for_ends, for_feeds)
    return replace(planned(name, variant, costs_us, schedule, priorities), multiprocessors=parts)


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


def budget_of(alone: Planned, pool_bytes: int | None) -> int:
    """Limit in bytes for the planned pool: `pool_bytes` if given, else the pool on one stream and a share of the step.

    The share is a fifth of the whole step, parameters and optimizer state included, or 32 MiB if that is more.
    """
    if pool_bytes is not None:
        return pool_bytes
    alone_bytes = alone.memory.peak_bytes
    return alone_bytes + max((held_bytes(alone.recording) + alone_bytes) // EXTRA_DIVISOR, MIN_EXTRA_BYTES)


def most_taken(recording: Recording, alone_bytes: int, workspaces: int) -> int:
    """Limit in bytes for the measured pool on several streams, if the recorded order on one takes `alone_bytes`.

    It is the memory of a plain graph, which has `workspaces` more workspaces, and a quarter of the whole step with such
    a graph. Without this limit DLRM on eight streams took 1.52 times the memory, for 1 % less time than on four.
    """
    plain_bytes = alone_bytes + workspaces * WORKSPACE_BYTES
    return plain_bytes + (held_bytes(recording) + plain_bytes) // TAKEN_DIVISOR


def held_bytes(recording: Recording) -> int:
    """Bytes that were allocated before the step: parameters, the optimizer's state, the batch."""
    return sum(storage.nbytes() for storage in recording.held.values())
