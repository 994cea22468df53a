"""StreamConfig: stream parallelism chosen by the user. Scheduler: what is used of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kitsune.errors import SettingsError

ROLES: Final = ("priority_streams", "compute_streams", "memory_streams")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How many CUDA streams to use, and for what.

    `num_streams`: the most streams, 1 to 64, on which launches of forward and backward run; a plan uses at most 8.
    Stream priorities and what runs on each stream are decided by measuring. So `priority_streams`, `compute_streams`
    and `memory_streams` (indices of streams, from 0) are declined with that reason.
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
    """Raises SettingsError unless this is an integer from 1 to 64."""
    if type(count) is not int or not 1 <= count <= 64:
        raise SettingsError(f"{name} must be an integer between 1 and 64")


def numbers_of(role: str, given: Any, count: int) -> tuple[int, ...]:
    """Stream indices as a tuple. Raises SettingsError when they are not a list of indices below `count`."""
    if isinstance(given, list | tuple) and all(type(each) is int and 0 <= each < count for each in given):
        return tuple(given)
    raise SettingsError(f"StreamConfig.{role} is {given!r:.100}; give a list of stream indices, 0 to {count - 1}")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How launches are issued.

    `num_streams`: the number of CUDA streams on which launches of forward and backward run; 1 without a schedule.
    """

    num_streams: int
