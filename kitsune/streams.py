"""StreamConfig: stream parallelism as the user asks for it by hand; Scheduler: what came of it."""

from dataclasses import dataclass

from kitsune.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How many streams, and which of them are for what.

    `num_streams`: on up to how many, 1 to 64, the launches of forward and backward run; a plan has at most 8. Which
    stream goes first and what runs on it is found out by measuring, so `priority_streams`, `compute_streams` and
    `memory_streams` (numbers of streams) are declined with that reason.
    """

    num_streams: int = 4
    priority_streams: tuple[int, ...] = ()
    compute_streams: tuple[int, ...] = ()
    memory_streams: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.num_streams) is not int or not 1 <= self.num_streams <= 64:
            raise SettingsError("StreamConfig.num_streams must be an integer between 1 and 64")


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How launches are issued.

    `num_streams`: on up to how many CUDA streams launches of forward and backward run; 1 where none is planned.
    """

    num_streams: int
