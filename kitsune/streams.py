"""StreamConfig: stream parallelism as the user asks for it by hand; Scheduler: what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kitsune.errors import SettingsError

ROLES: Final = ("priority_streams", "compute_streams", "memory_streams")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How many streams, and which of them are for what.

    `num_streams`: on up to how many, 1 to 64, the launches of forward and backward run; a plan has at most 8. Which
    stream goes first and what runs on it is found out by measuring, so `priority_streams`, `compute_streams` and
    `memory_streams` (numbers of streams, from 0) are declined with that reason.
    """

    num_streams: int = 4
    priority_streams: Sequence[int] = ()
    compute_streams: Sequence[int] = ()
    memory_streams: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_count("StreamConfig.num_streams", self.num_streams)
        for role in ROLES:
            object.__setattr__(self, role, numbers_of(role, getattr(self, role), self.num_streams))


def check_count(name: str, count: Any) -> None:
    """Raises SettingsError for a number of streams that nobody can have."""
    if type(count) is not int or not 1 <= count <= 64:
        raise SettingsError(f"{name} must be an integer between 1 and 64")


def numbers_of(role: str, given: Any, count: int) -> tuple[int, ...]:
    """A list of streams as a tuple. Raises SettingsError for what is none."""
    if isinstance(given, list | tuple) and all(type(each) is int and 0 <= each < count for each in given):
        return tuple(given)
    raise SettingsError(f"StreamConfig.{role} is {given!r:.100}; it lists streams by their numbers, 0 to {count - 1}")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How launches are issued.

    `num_streams`: on up to how many CUDA streams launches of forward and backward run; 1 where none is planned.
    """

    num_streams: int
