"""Detects what disturbs measurements on a GPU: throttling, other processes, a low clock. Does not import torch.

A slowdown disturbs the round in which it begins or ends. A slowdown that lasts is taken as the state of the GPU: it
slows all arms alike.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tuner.records import Cause, CauseKind

try:
    import pynvml
except ImportError:  # the extra is not installed: measuring works, but disturbances are not detected
    pynvml = None

# Not SwPowerCap (0x4): a GPU under matrix products runs at its power limit all the time.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
LOW_CLOCK = 0.75  # of the highest clock seen; nvbench discards samples by the same rule


@dataclass(frozen=True, slots=True)
class GpuState:
    """What NVML reports at one moment: SM clock in MHz, bits of throttle reasons, PIDs of processes with a context."""

    sm_mhz: int
    reasons: int
    processes: frozenset[int]


class NoWatch:
    """Stands in for GpuWatch where NVML is not available: detects nothing, and notes why."""

    def __init__(self, note: str = "") -> None:
        self._notes = (note,) if note else ()

    def disturbance(self) -> None:
        return None

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def causes(self) -> tuple[Cause, ...]:
        return ()


def family() -> set[int]:
    """PIDs of this process, its parent and all the parent's descendants, which are stopped while this one is timed."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = status.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(status.parent.name)] = int(fields[1])
    found = {os.getpid(), os.getppid()}
    grown = found
    while grown:
        grown = {process for process, parent in parents.items() if parent in found} - found
        found |= grown
    return found


class GpuWatch:
    """Compares the state of the GPU after each round with the state before it and at the start."""

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._mine = family()
        self._first = self._last = self._state()
        self._clocks = [self._first.sm_mhz]
        self._seen: dict[CauseKind, str] = {}

    def disturbance(self) -> str | None:
        try:
            now = self._state()
        except pynvml.NVMLError:
            return None  # NVML worked at the start: one failed query is no reason to drop a round
        self._clocks.append(now.sm_mhz)
        found = what_disturbed(self._first, self._last, now, max(self._clocks), self._mine)
        self._last = now
        for cause in filter(None, (throttling(now.reasons), found)):
            self._seen[cause.kind] = cause.seen
        return None if found is None else found.seen

    def notes(self) -> tuple[str, ...]:
        clocks = f"SM clock {min(self._clocks)} to {max(self._clocks)} MHz"
        others = self._others()
        return (clocks, others) if others else (clocks,)

    def causes(self) -> tuple[Cause, ...]:
        seen = dict(self._seen)
        if others := self._others():
            seen[CauseKind.GPU_PROCESS] = others
        return tuple(Cause(kind=kind, seen=what) for kind, what in seen.items())

    def _others(self) -> str:
        """In a container NVML reports other PIDs than ours, so other processes cannot be told from our own."""
        others = self._first.processes - self._mine if os.getpid() in self._first.processes else frozenset()
        return f"other processes were on this GPU all the time: {_listed(others)}" if others else ""

    def _state(self) -> GpuState:
        return GpuState(
            sm_mhz=pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
            reasons=pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle),
            processes=frozenset(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)),
        )


def what_disturbed(
    first: GpuState, before: GpuState, now: GpuState, highest_mhz: int, mine: Iterable[int]
) -> Cause | None:
    """Why a round that began in state `before` and ended in `now` must be dropped, or None."""
    slowdown = throttling(now.reasons)
    if (slowdown is None) is not (throttling(before.reasons) is None):
        return slowdown or throttling(before.reasons)
    newcomers = now.processes - first.processes - set(mine)
    if newcomers:
        seen = f"another process came onto the GPU: {_listed(newcomers)}"
        return Cause(kind=CauseKind.GPU_PROCESS, seen=seen)
    if slowdown is None and now.sm_mhz < LOW_CLOCK * highest_mhz:
        seen = f"the SM clock fell below {LOW_CLOCK:.0%} of the highest seen"
        return Cause(kind=CauseKind.GPU_CLOCK, seen=seen)
    return None


def throttling(reasons: int) -> Cause | None:
    slowdown = next((name for bit, name in SLOWDOWNS.items() if reasons & bit), None)
    return None if slowdown is None else Cause(kind=CauseKind.GPU_CLOCK, seen=f"the GPU throttled: {slowdown}")


def watch_gpu(uuid: str) -> GpuWatch | NoWatch:
    if pynvml is None:
        return NoWatch("clocks and other processes were not watched: nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        return GpuWatch(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError as error:
        return NoWatch(f"clocks and other processes were not watched: {error}")


def _listed(processes: Iterable[int]) -> str:
    return ", ".join(f"PID {process}" for process in sorted(processes))
