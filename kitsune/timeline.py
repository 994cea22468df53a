"""Timeline: the planned launches of a training step on their streams, as a record that can be stored."""

from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from kitsune.base.base_record import Record

MAX_STREAMS = 64
MAX_NAME = 200
MAX_CLASSES = 20
MAX_TOLD = 4000
LONGEST_US = 1e12

Moment = Annotated[float, Field(ge=0, le=LONGEST_US, allow_inf_nan=False)]


class Launched(NamedTuple):
    """A launch on its stream.

    `name`: index into `Timeline.names`. `waits`: indices in the timeline of the launches on other streams whose end it
    waits for. `used_bytes`: memory of intermediate tensors in use once it is issued. Times are predictions.
    """

    name: Annotated[int, Field(ge=0)]
    stream: Annotated[int, Field(ge=0, lt=MAX_STREAMS)]
    begin_us: Moment
    end_us: Moment
    waits: Annotated[tuple[int, ...], Field(max_length=MAX_STREAMS)]
    used_bytes: Annotated[int, Field(ge=0, lt=2**63)]


class ClassTime(NamedTuple):
    """All launches of one class of kernels. `floor_us`: the least time in which the device could do the same work."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    launches: Annotated[int, Field(ge=0)]
    total_us: Moment
    floor_us: Moment


class Timeline(Record):
    """The launches of a step, in the order in which the host issues them."""

    told: str = Field(
        default="", max_length=MAX_TOLD, description="summary of the schedule, and the heuristic that made it"
    )
    streams: int = Field(ge=1, le=MAX_STREAMS)
    names: tuple[Annotated[str, Field(max_length=MAX_NAME)], ...]
    launches: tuple[Launched, ...] = Field(
        description="[index of the name, stream, begin in us, end in us, [launches that it waits for], bytes in use]"
    )
    left_out: int = Field(default=0, ge=0, description="how many of the shortest launches are left out")
    classes: tuple[ClassTime, ...] = Field(
        default=(),
        max_length=MAX_CLASSES,
        description="[class of kernels, launches, us in all, least us that the device allows], each launch alone",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for place, launch in enumerate(self.launches):
            if launch.name >= len(self.names) or launch.stream >= self.streams:
                raise ValueError(f"launch {place} has a name or a stream that the timeline does not have")
            if launch.end_us < launch.begin_us:
                raise ValueError(f"launch {place} ends before it begins")
            if launch.waits and not 0 <= min(launch.waits) <= max(launch.waits) < place:
                raise ValueError(f"launch {place} waits for a launch that was not issued before it")
        return self

    @property
    def makespan_us(self) -> float:
        """When the last launch ends, in microseconds."""
        return max((launch.end_us for launch in self.launches), default=0.0)

    def name_of(self, launch: Launched) -> str:
        return self.names[launch.name]
