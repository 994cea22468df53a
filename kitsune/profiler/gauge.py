"""Gauge: current and peak memory for any number of concurrent watches.

A GPU and a process have a single peak counter each, and resetting it loses the peak for every other reader. So all
watches of a memory share one gauge, which passes each reading to all of them before it resets the counter.
"""

import functools
import threading
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from kitsune.device import backend as devices
from kitsune.profiler.resident import Resident

RESIDENT: Final = "resident memory of this process"
SAMPLED: Final = "resident memory of this process, sampled: its peak cannot be reset here"


class Memory(Protocol):
    """A memory with a counter of its peak. `reset` returns whether the peak was reset."""

    def now(self) -> int: ...

    def peak(self) -> int: ...

    def reset(self) -> bool: ...


class Tensors:
    """Bytes of tensors on one GPU, as torch's allocator counts them, without waiting for the GPU."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # required before the counters can be reset
        self.device = device

    def now(self) -> int:
        return devices.allocated_bytes(self.device)

    def peak(self) -> int:
        return devices.peak_bytes(self.device)

    def reset(self) -> bool:
        devices.reset_peak(self.device)
        return True


@dataclass(slots=True, eq=False)
class MemoryWatch:
    """Memory in bytes when one tracker began, and the peak since then."""

    begin_bytes: int
    highest_bytes: int


class Gauge:
    """Reads a memory on behalf of all its watches. `highest_bytes` is the highest value ever read.

    Where the counter cannot be reset, only a new peak of the whole process is seen exactly; a lower peak is seen only
    if a reading samples it, and `source` says so.
    """

    def __init__(self, memory: Memory, source: str, sampled_source: str = "") -> None:
        self.highest_bytes = 0
        self._memory = memory
        self._sources = source, sampled_source
        self._watches: list[MemoryWatch] = []
        self._lock = threading.Lock()
        self._mark = 0
        self._can_reset = True

    @property
    def source(self) -> str:
        """A description of the memory."""
        exact, sampled = self._sources
        return exact if self._can_reset else sampled

    def begin(self) -> MemoryWatch:
        with self._lock:
            now = self._read()
            watch = MemoryWatch(now, now)
            self._watches.append(watch)
            return watch

    def read(self) -> int:
        """The level now. Updates the peak of every watch."""
        with self._lock:
            return self._read()

    def end(self, watch: MemoryWatch) -> int:
        """Removes a watch, and returns the level now."""
        with self._lock:
            now = self._read()
            self._watches.remove(watch)
            return now

    def _read(self) -> int:
        now, peak = self._memory.now(), self._memory.peak()
        seen = max(now, peak) if self._can_reset or peak > self._mark else now
        self.highest_bytes = max(self.highest_bytes, seen)
        for watch in self._watches:
            watch.highest_bytes = max(watch.highest_bytes, seen)
        self._can_reset = self._memory.reset()
        self._mark = self._memory.peak()
        return now


@functools.cache
def gauge_of(device: torch.device) -> Gauge:
    """The gauge of a device, shared in this process. `device` is a result of `pick_device`."""
    if device.type == "cuda":
        return Gauge(Tensors(device), f"tensors on {device}")
    return Gauge(Resident(), RESIDENT, SAMPLED)
