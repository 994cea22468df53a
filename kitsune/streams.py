"""StreamConfig: stream parallelism as the user asks for it by hand."""

from dataclasses import dataclass

from kitsune.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How many streams, and which of them are for what."""

    num_streams: int = 4
    priority_streams: tuple[int, ...] = ()
    compute_streams: tuple[int, ...] = ()
    memory_streams: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= 64:
            raise SettingsError("StreamConfig.num_streams must be between 1 and 64")
