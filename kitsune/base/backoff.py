"""Retries with exponential backoff and jitter, and a sleep that can be interrupted."""

import time
from collections.abc import Callable, Iterable, Iterator
from random import SystemRandom
from typing import TypeVar

Answer = TypeVar("Answer")

TICK_S = 0.1
_chance = SystemRandom()


def pauses(first_s: float, most_s: float) -> Iterator[float]:
    """Endless pauses in seconds, doubling from `first_s` to `most_s`.

    Each is shortened at random by up to half, so that workers that lost the database together do not all reconnect at
    the same time.
    """
    longest_s = first_s
    while True:
        yield longest_s * _chance.uniform(0.5, 1.0)
        longest_s = min(most_s, 2 * longest_s)


def within(seconds: float, waits: Iterable[float]) -> Iterator[float]:
    """The pauses that begin within so many seconds from the first."""
    end = time.monotonic() + seconds
    for wait_s in waits:
        if time.monotonic() >= end:
            return
        yield wait_s


def retried(
    ask: Callable[[], Answer],
    error: type[Exception],
    waits: Iterable[float],
    before_retry: Callable[[Exception], None] = lambda _: None,
) -> Answer:
    """The answer of `ask`, which is called again after each of these pauses while it raises `error`.

    Raises the error of the last call, after the last pause.
    """
    for wait_s in waits:
        try:
            return ask()
        except error as found:
            before_retry(found)
        time.sleep(wait_s)
    return ask()


def rest(seconds: float, check: Callable[[], None]) -> None:
    """Sleeps and calls `check` every `TICK_S`; an exception from it ends the sleep and propagates."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        check()
        time.sleep(min(TICK_S, left_s))
