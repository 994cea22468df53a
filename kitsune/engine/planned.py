"""Planned: what may be done with a recorded step: which launches go on which streams, and the memory that they need."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kitsune.engine.costs import measured_us
from kitsune.engine.memory import MemoryPlan, within
from kitsune.engine.recording import Recording
from kitsune.engine.schedule import Schedule
from kitsune.engine.split import split
from kitsune.engine.state import State
from kitsune.engine.trace import svg_of, trace_of

#: The most that one of the buckets of parameters may hold that are updated apart; the best by prediction is taken.
BUCKETS_BYTES: Final = (2**26, 2**24, 2**22)
LEAST_MORE_BYTES: Final = 2**25  # cuBLAS alone takes twice as much for every stream
WAIT_US: Final = 1.5  # an event between two streams of a CUDA graph on an H200
STEADY_WAIT_US: Final = 6.0  # as if it cost more: kernels that follow each other on one stream share its caches
MOST_URGENT: Final = 3  # torch makes streams of four priorities


@dataclass(frozen=True, slots=True)
class Planned:
    """What was decided for a step: what it launches, when and where, and the memory that it needs.

    `priorities` of the streams, if any: kernels of a lower one go first where the GPU is full.
    """

    recording: Recording
    costs_us: Sequence[float]
    schedule: Schedule
    memory: MemoryPlan
    priorities: tuple[int, ...] = ()

    def save_trace(self, path: str | Path) -> None:
        """As JSON that Perfetto opens (https://ui.perfetto.dev)."""
        Path(path).write_text(json.dumps(trace_of(self.recording.graph, self.schedule, self.memory)), encoding="utf-8")

    def save_svg(self, path: str | Path) -> None:
        Path(path).write_text(svg_of(self.recording.graph, self.schedule), encoding="utf-8")


def plans(recording: Recording, streams: int, pool_bytes: int | None) -> list[Planned]:
    """Ways to issue a recorded step on 1 to `streams` streams in a pool, the quickest by prediction first.

    None: a pool of a quarter more than one stream needs. When nothing fits, what needs the least. Leaves the state of
    the step as it was. Raises CaptureError when its launches cannot be timed.
    """
    (alone,) = found = _plans(recording, 1, pool_bytes)
    budget_bytes = budget_of(alone, pool_bytes)
    if streams > 1:
        ways = {len(way.calls): way for way in (split(recording, size) for size in BUCKETS_BYTES)}
        best = min((_plans(way, streams, budget_bytes) for way in ways.values()), key=quickest_us)
        found += [plan for plan in best if plan.schedule.streams > 1]
    fitting = [plan for plan in found if plan.memory.peak_bytes <= budget_bytes]
    if not fitting:
        return [min(found, key=lambda plan: plan.memory.peak_bytes)]
    return sorted(fitting, key=lambda plan: plan.schedule.makespan_us)


def by_load(schedule: Schedule) -> tuple[int, ...]:
    """A priority for each stream, as CUDA counts them: 0 for the least busy, and lower, down to -3, is more urgent."""
    busy_us = [0.0] * schedule.streams
    for placed in schedule.placed:
        busy_us[placed.stream] += placed.end_us - placed.begin_us
    ranks = sorted(range(schedule.streams), key=lambda stream: busy_us[stream])
    return tuple(-min(ranks.index(stream), MOST_URGENT) for stream in range(schedule.streams))


def first_first(schedule: Schedule) -> tuple[int, ...]:
    """Priorities by which the first stream goes before all others."""
    return (-MOST_URGENT, *[0] * (schedule.streams - 1))


def budget_of(alone: Planned, pool_bytes: int | None) -> int:
    """What several streams may take: what somebody said, or a quarter more than one stream takes."""
    if pool_bytes is not None:
        return pool_bytes
    alone_bytes = alone.memory.peak_bytes
    return alone_bytes + max(alone_bytes // 4, LEAST_MORE_BYTES)


def quickest_us(found: Sequence[Planned]) -> float:
    return min(plan.schedule.makespan_us for plan in found)


def _plans(recording: Recording, streams: int, pool_bytes: int | None) -> list[Planned]:
    before = State(recording)
    try:
        costs_us = measured_us(recording)
    finally:
        before.restore()
    fitting = within(recording.graph, costs_us, streams, WAIT_US, pool_bytes)
    return [Planned(recording, costs_us, schedule, memory) for schedule, memory in fitting]
