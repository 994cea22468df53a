"""Plans when the host releases each storage of a scheduled step, and the peak memory. Pure functions.

A storage is allocated on the stream of the launch that makes it. Torch's caching allocator gives a released block to
the next allocation on the same stream, without looking at other streams. So a storage is released only when its stream
is known to come after all of its uses.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kitsune.launches.model.launch_graph import LaunchGraph, Storage
from kitsune.launches.planning.schedule import Schedule, VectorClock, clocks

BLOCK_BYTES: Final = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """When the step's own storages are released, and their memory in blocks as torch rounds them.

    `releases[p]`: the storages to release right before the launch at issue position p; the last entry is for after the
    last launch. Storages that are kept are in none.
    `peak_bytes`: the sum of each stream's peak, without fragmentation.
    `naive_bytes`: the sum of all storages of the step's own, if no memory is reused.
    """

    releases: tuple[tuple[int, ...], ...]
    peak_bytes: int
    naive_bytes: int


def plan_memory(graph: LaunchGraph, schedule: Schedule) -> MemoryPlan:
    """The plan that releases every storage at the first position at which its memory can be reused safely."""
    touchers = graph.touchers()
    releases = plan_releases(graph, schedule, touchers)
    naive_bytes = sum(rounded_bytes(storage) for storage in graph.storages if storage.is_own)
    peaks_bytes = map(max, zip(*in_use_bytes(graph, schedule, releases, touchers), strict=True))
    return MemoryPlan(releases, sum(peaks_bytes), naive_bytes)


def plan_releases(
    graph: LaunchGraph, schedule: Schedule, touchers: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """For every issue position, and for after the last one, the storages to release right before it."""
    releases: list[list[int]] = [[] for _ in range(len(schedule.placed) + 1)]
    seen = clocks(schedule)
    positions = positions_of(schedule)
    lanes = [[p for p, placed in enumerate(schedule.placed) if placed.stream == s] for s in range(schedule.streams)]
    for number, (storage, launches) in enumerate(zip(graph.storages, touchers, strict=True)):
        if storage.is_own and not storage.is_kept:
            touched = [positions[launch] for launch in launches]
            releases[release_position(schedule, seen, lanes, touched)].append(number)
    return tuple(map(tuple, releases))


def release_position(
    schedule: Schedule, seen: Sequence[VectorClock], lanes: Sequence[Sequence[int]], touched: Sequence[int]
) -> int:
    """The position of the first launch on the storage's stream that begins after all launches that touch the storage.

    Any launch may reuse the memory, not only one that makes a storage, because operations allocate workspaces. The
    vector clocks of a stream only grow, so the same holds for all later launches there. A launch that is known to have
    ended has also been issued.
    """
    if not touched:
        return len(schedule.placed)
    ended: dict[int, int] = {}  # stream -> how many of its launches must be known to have ended
    for position in touched:
        stream = schedule.placed[position].stream
        ended[stream] = max(ended.get(stream, 0), seen[position][stream] + 1)
    lane = lanes[schedule.placed[touched[0]].stream]
    index = bisect_left(lane, True, key=lambda position: all(seen[position][s] >= n for s, n in ended.items()))
    return lane[index] if index < len(lane) else len(schedule.placed)


def in_use_bytes(
    graph: LaunchGraph, schedule: Schedule, releases: Sequence[Sequence[int]], touchers: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """For every issue position, the bytes in use on each stream, including what that launch makes."""
    makers: dict[int, list[int]] = {}
    for storage, launches in enumerate(touchers):
        if graph.storages[storage].is_own and launches:
            makers.setdefault(launches[0], []).append(storage)
    stream_of: dict[int, int] = {}
    used, found = [0] * schedule.streams, []
    for position, placed in enumerate(schedule.placed):
        for storage in releases[position]:
            used[stream_of[storage]] -= rounded_bytes(graph.storages[storage])
        for storage in makers.get(placed.launch, ()):
            stream_of[storage] = placed.stream
            used[placed.stream] += rounded_bytes(graph.storages[storage])
        found.append(tuple(used))
    return found


def rounded_bytes(storage: Storage) -> int:
    """The size of a storage in whole blocks."""
    return -(-storage.nbytes // BLOCK_BYTES) * BLOCK_BYTES


def positions_of(schedule: Schedule) -> dict[int, int]:
    """launch -> its issue position."""
    return {placed.launch: position for position, placed in enumerate(schedule.placed)}
