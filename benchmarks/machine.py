"""What this machine was doing meanwhile: its cores, its load, and the time that others took from it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

CORES: Final = sorted(os.sched_getaffinity(0))


class Ticks(NamedTuple):
    """Of all cores since the start: what all processes had, what the hypervisor gave to other machines, and all."""

    busy: int
    stolen: int
    whole: int


def ticks() -> Ticks:
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, file.readline().split()[1:9])
    busy = user + nice + system + interrupts + soft
    return Ticks(busy, stolen, busy + stolen + idle + waiting)


def conditions(before: Ticks) -> dict[str, Any]:
    """Since then, in shares of all cores; and the load of the last minute."""
    now = ticks()
    whole = max(1, now.whole - before.whole)
    return {
        "cores": len(CORES),
        "loadavg": os.getloadavg()[0],
        "busy_share": round((now.busy - before.busy) / whole, 3),
        "stolen_share": round((now.stolen - before.stolen) / whole, 3),
    }


def processor_s(process: int) -> float:
    """How long this process, with its threads, has been on a core so far."""
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def on_core(index: int) -> Iterator[None]:
    """This thread, and the processes that it starts meanwhile, on one of the cores that it had at first."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[index]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
