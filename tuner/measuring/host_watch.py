"""Detects what disturbs measurements on the CPU, from /proc and the control group (Linux). Does not import torch.

All rounds are judged together, since a round of 40 ms is only four ticks of the kernel's clock. So no round is dropped;
the causes explain why times differ.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.records import Cause, CauseKind

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
#: Below these shares nothing is reported: a quiet machine shows as much, by daemons, stolen ticks and rounding.
BUSY_SHARE: Final = 0.1
STEAL_SHARE: Final = 0.02
QUOTA_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class HostCounters:
    """CPU seconds since boot, summed over all cores: busy, idle, and stolen by other machines on the same host.

    `own_s` is the CPU time of this process, `throttled_s` how long its control group was throttled.
    """

    at_s: float
    busy_s: float
    idle_s: float
    steal_s: float
    own_s: float
    throttled_s: float


class HostWatch:
    """Compares the state of the processors now with their state when this object was made."""

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._first = self._state()

    def disturbance(self) -> None:
        return None

    def notes(self) -> tuple[str, ...]:
        if self._first is None:
            return ("load and steal of the processors were not watched: this system has no /proc/stat",)
        try:
            load = (self._proc / "loadavg").read_text().split()[0]
        except (OSError, IndexError):
            return ()
        return (f"load average {load} on {os.cpu_count()} cores",)

    def causes(self) -> tuple[Cause, ...]:
        now = self._state()
        if self._first is None or now is None:
            return ()
        return tuple(what_disturbed(self._first, now, os.cpu_count() or 1))

    def _state(self) -> HostCounters | None:
        try:
            ticks = [int(word) for word in (self._proc / "stat").read_text().split("\n")[0].split()[1:9]]
            user, nice, system, idle, waiting, irq, softirq, steal = (count / TICKS_PER_S for count in ticks)
        except (OSError, ValueError):
            return None
        used = os.times()
        return HostCounters(
            at_s=time.monotonic(),
            busy_s=user + nice + system + irq + softirq,
            idle_s=idle + waiting,
            steal_s=steal,
            own_s=used.user + used.system,
            throttled_s=self._throttled_s(),
        )

    def _throttled_s(self) -> float:
        """0 where no quota is set or it cannot be read."""
        try:
            lines = (self._cgroup / "cpu.stat").read_text().splitlines()
        except OSError:
            return 0.0
        found = [line.split() for line in lines if line.startswith("throttled_usec ")]
        return int(found[0][1]) / 1e6 if found else 0.0


def what_disturbed(first: HostCounters, now: HostCounters, cores: int) -> Iterator[Cause]:
    """Each reason why times measured between the two states may differ."""
    took_s = now.at_s - first.at_s
    busy_s, steal_s = now.busy_s - first.busy_s, now.steal_s - first.steal_s
    all_s = busy_s + steal_s + now.idle_s - first.idle_s
    if took_s <= 0 or all_s <= 0:
        return
    others = max(0.0, busy_s - (now.own_s - first.own_s)) / took_s
    if others > BUSY_SHARE * cores:
        yield Cause(kind=CauseKind.LOAD, seen=f"other processes kept {others:.1f} of {cores} cores busy")
    if steal_s > STEAL_SHARE * all_s:
        yield Cause(
            kind=CauseKind.STEAL, seen=f"other machines on the same host took {steal_s / all_s:.0%} of the CPU time"
        )
    throttled_s = now.throttled_s - first.throttled_s
    if throttled_s > QUOTA_SHARE * took_s:
        seen = f"the CPU limit of this container held it back {throttled_s / took_s:.0%} of the time"
        yield Cause(kind=CauseKind.QUOTA, seen=seen)
