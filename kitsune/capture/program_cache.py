"""One program for each batch signature: the first at once, another one when its batches are frequent."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, Generic, TypeVar

import torch

Program = TypeVar("Program")

PATIENCE: Final = 8  # batches of another signature that run without a program of their own
MAX_SEEN: Final = 256  # signatures that are counted
MAX_UNCOUNTED: Final = 16


class ProgramCache(Generic[Program]):
    """At most `most` programs by key, made by `make`. `current` is the one that was asked for last.

    Programs for which `is_counted` is False take little memory: up to MAX_UNCOUNTED of them are kept besides.
    """

    def __init__(
        self, most: int, make: Callable[[], Program], is_counted: Callable[[Program], bool] = lambda _: True
    ) -> None:
        self._most = most
        self._make = make
        self._is_counted = is_counted
        self._programs: dict[Hashable, Program] = {}
        self._seen: dict[Hashable, int] = {}
        self.current: Program | None = None

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def __len__(self) -> int:
        return len(self._programs)

    def find(self, key: Hashable) -> Program | None:
        program = self._programs.get(key)
        if program is not None:
            self.current = program
        return program

    def admit(self, key: Hashable) -> Program | None:
        """A program for a key that has none; None while its batches are rare, and where there are enough programs."""
        if self._programs:
            self._count(key)
            if self.is_rare(key) or self._is_full():
                return None
        self._programs[key] = self.current = program = self._make()
        return program

    def _is_full(self) -> bool:
        counted = sum(map(self._is_counted, self._programs.values()))
        return counted >= self._most or len(self._programs) - counted >= MAX_UNCOUNTED

    def is_rare(self, key: Hashable) -> bool:
        return self._seen.get(key, 0) <= PATIENCE

    def _count(self, key: Hashable) -> None:
        if len(self._seen) >= MAX_SEEN and key not in self._seen:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1

    def forget(self, program: Program) -> None:
        """The next batch of its signature gets a new program, at once."""
        self._programs = {key: one for key, one in self._programs.items() if one is not program}
        if self.current is program:
            self.current = None

    def clear(self) -> None:
        self._programs.clear()
        self._seen.clear()
        self.current = None


def autocast_of(kind: str) -> tuple[Any, ...] | None:
    """The user's own autocast, which decides what a forward launches; part of a key."""
    if not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
