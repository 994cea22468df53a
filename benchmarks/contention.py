"""A model of launches that share the GPU: each takes part of the room for blocks, and what finds no room waits.

The room of a kernel follows from its grid, registers and shared memory, which Kineto tells; so does how much of it one
wave of its blocks fills. Launches side by side run at full speed while their parts come to less than the whole. Beyond,
the more urgent stream, and on streams alike the launch that began first, gets what it needs. Memory bandwidth does not
count. Suite plans tells how near its times come to measured ones.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from kitsune.launches.execution.launch_costs import MARK, START_US, marked, tasks_of
from kitsune.launches.model.recording import Recording
from kitsune.launches.planning.candidates import WAIT_US
from kitsune.launches.planning.schedule import Placed, Schedule

#: Blocks that a multiprocessor holds at most, and shared memory that it keeps for itself for each, since Ampere.
MOST_BLOCKS: Final = 32
KEPT_BYTES: Final = 1024
#: Registers are given out for a warp at a time, in multiples of this.
REGISTERS_STEP: Final = 256
WARP: Final = 32
#: Of sums of times.
ERROR_US: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Room:
    """What the multiprocessors of a GPU hold: how many there are, and what each has."""

    multiprocessors: int
    threads: int
    registers: int
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "Room":
        found = torch.cuda.get_device_properties(device)
        return cls(
            found.multi_processor_count,
            found.max_threads_per_multi_processor,
            found.regs_per_multiprocessor,
            found.shared_memory_per_multiprocessor,
        )

    def blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """How many such blocks one multiprocessor holds; at least one, since it runs."""
        warps = math.ceil(threads / WARP)
        of_warp = math.ceil(registers * WARP / REGISTERS_STEP) * REGISTERS_STEP
        by_registers = self.registers // (of_warp * warps) if registers else MOST_BLOCKS
        by_memory = self.shared_bytes // (shared_bytes + KEPT_BYTES)
        return max(1, min(MOST_BLOCKS, self.threads // (warps * WARP), by_registers, by_memory))

    def share(self, metadata: str) -> float:
        """The part of the room that a kernel takes; 1.0 for what is no kernel or tells nothing."""
        told = json.loads("{" + metadata + "}")
        if "grid" not in told:
            return 1.0
        threads = math.prod(told["block"])
        held = self.blocks(threads, told.get("registers per thread", 0), told.get("shared memory", 0))
        return min(1.0, math.prod(told["grid"]) / (held * self.multiprocessors))


def shares(recording: Recording) -> list[float]:
    """The part of the GPU that each launch takes, on the average of its kernels by their time. Runs the step."""
    room = Room.of(recording.device)
    with recording.saved_state():
        kernels = traced(lambda: marked(tasks_of(recording)))
    found = list(between_marks(kernels, room))
    count = len(recording.calls)
    return found[:count]


def traced(function: Callable[[], Any]) -> list[Any]:
    """Kineto's events of what ran on the GPU, by their begin."""
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_kineto=True, use_cpu=False) as profiled:
        function()
        torch.cuda.synchronize()
    assert profiled.kineto_results is not None
    events = [each for each in profiled.kineto_results.events() if each.device_type() == DeviceType.CUDA]
    return sorted((each for each in events if not each.is_user_annotation()), key=lambda each: each.start_ns())


def between_marks(kernels: Iterable[Any], room: Room) -> Iterable[float]:
    took_us, taken = 0.0, 0.0
    for kernel in kernels:
        if MARK in kernel.name():
            yield taken / took_us if took_us else 0.0
            took_us = taken = 0.0
        else:
            us = kernel.duration_ns() / 1e3 + START_US
            took_us, taken = took_us + us, taken + us * room.share(kernel.metadata_json())


def shared_us(
    schedule: Schedule, costs_us: Sequence[float], shares: Sequence[float], priorities: Sequence[int] = ()
) -> float:
    """When the last launch of a schedule ends. `priorities`: the lower the more urgent, one for each stream."""
    queues: list[list[Placed]] = [[] for _ in range(schedule.streams)]
    for placed in reversed(schedule.placed):
        queues[placed.stream].append(placed)
    urgent = priorities or [0] * schedule.streams
    ended: dict[int, tuple[float, int]] = {}  # launch -> when, on which stream
    running: list[tuple[int, float, Placed]] = []  # (priority, begin, launch), the most urgent first
    left_us = dict(enumerate(costs_us))
    now_us = 0.0
    while running or any(queues):
        busy = {placed.stream for *_, placed in running}
        ready = [(begin_of(queue[-1], ended), queue) for queue in queues if queue and queue[-1].stream not in busy]
        for begin_us, queue in ready:
            if begin_us <= now_us + ERROR_US:
                placed = queue.pop()
                running.append((urgent[placed.stream], now_us, placed))
        running.sort(key=lambda one: one[:2])
        speeds = speeds_of([shares[placed.launch] for *_, placed in running])
        waiting_us = [begin_us - now_us for begin_us, queue in ready if now_us + ERROR_US < begin_us < math.inf]
        ends_us = [left_us[one[2].launch] / speed for one, speed in zip(running, speeds, strict=True) if speed]
        step_us = min([*waiting_us, *ends_us])
        now_us += step_us
        for (*_, placed), speed in zip(running, speeds, strict=True):
            left_us[placed.launch] -= step_us * speed
            if left_us[placed.launch] <= ERROR_US:
                ended[placed.launch] = now_us, placed.stream
        running = [one for one in running if one[2].launch not in ended]
    return now_us


def begin_of(placed: Placed, ended: dict[int, tuple[float, int]]) -> float:
    """When what it waits for on other streams is known there; infinite while one of these has not ended."""
    if any(launch not in ended for launch in placed.waits):
        return math.inf
    return max((ended[launch][0] + WAIT_US for launch in placed.waits), default=0.0)


def speeds_of(shares: Iterable[float]) -> list[float]:
    """How fast each of the launches runs, the most urgent first, where the room is 1."""
    room, found = 1.0, []
    for share in shares:
        speed = 1.0 if share <= room else room / share
        room = max(0.0, room - share * speed)
        found.append(speed)
    return found
