"""A memory in, its level now and the highest since each watch began out, however many watches look at it.

There is one counter of the peak for a GPU, and one for a process. Whoever resets it takes the peak from all others. So
all watches of a memory share one gauge, which hands every reading to each of them before it resets.
"""

import functools
import threading
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from kitsune.device import backend as devices
from kitsune.profiler import resident

RESIDENT: Final = "resident memory of this process"
SAMPLED: Final = "resident memory of this process, sampled: its peak cannot be reset here"


class Memory(Protocol):
    """A level with a counter of its peak."""

    def now(self) -> int: ...

    def peak(self) -> int: ...

    def reset(self) -> bool: ...


class Tensors:
    """Bytes in tensors on one GPU, as torch's allocator counts them; nothing waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # the counters cannot be reset before
        self.device = device

    def now(self) -> int:
        return devices.allocated_bytes(self.device)

    def peak(self) -> int:
        return devices.peak_bytes(self.device)

    def reset(self) -> bool:
        devices.reset_peak(self.device)
        return True


class Resident:
    """Bytes of this process that are in the host's memory, those of Python and its libraries included."""

    def now(self) -> int:
        return resident.resident_bytes()

    def peak(self) -> int:
        return resident.peak_resident_bytes()

    def reset(self) -> bool:
        return resident.reset_peak_resident()


@dataclass(slots=True, eq=False)
class Watch:
    """What one tracker has seen of a memory since it began, in bytes."""

    begin_bytes: int
    highest_bytes: int


class Gauge:
    """Reads a memory for all that watch it. `highest_bytes` is the most that was ever seen.

    Where the counter cannot be reset, a new record of the whole process is still seen; a lower peak only if a reading
    hits it, and `source` says so.
    """

    def __init__(self, memory: Memory, source: str, sampled_source: str = "") -> None:
        self.highest_bytes = 0
        self._memory = memory
        self._sources = source, sampled_source
        self._watches: list[Watch] = []
        self._lock = threading.Lock()
        self._mark = 0
        self._can_reset = True

    @property
    def source(self) -> str:
        """Which memory this is, in words."""
        exact, sampled = self._sources
        return exact if self._can_reset else sampled

    def begin(self) -> Watch:
        with self._lock:
            now = self._read()
            watch = Watch(now, now)
            self._watches.append(watch)
            return watch

    def read(self) -> int:
        """The level now, with the peak until now handed to every watch."""
        with self._lock:
            return self._read()

    def end(self, watch: Watch) -> int:
        """The level now; the watch sees nothing any more."""
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
    """The one gauge of a device in this process; `device` as `pick_device` gives it."""
    if device.type == "cuda":
        return Gauge(Tensors(device), f"tensors on {device}")
    return Gauge(Resident(), RESIDENT, SAMPLED)
