"""Bounds in, pauses between tries out: longer each time, up to a limit, never quite the same."""

import time
from collections.abc import Callable, Iterator
from random import SystemRandom

TICK_S = 0.1
_chance = SystemRandom()


def pauses(first_s: float, most_s: float) -> Iterator[float]:
    """Seconds to wait before each next try, without end: doubling from `first_s` to `most_s`.

    Each is shortened by up to half at random, so that workers that lost the database together do not all come back in
    the same moment.
    """
    longest_s = first_s
    while True:
        yield longest_s * _chance.uniform(0.5, 1.0)
        longest_s = min(most_s, 2 * longest_s)


def rest(seconds: float, check: Callable[[], None]) -> None:
    """Sleeps, and asks `check` every tick; what it raises ends the sleep and propagates."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        check()
        time.sleep(min(TICK_S, left_s))
