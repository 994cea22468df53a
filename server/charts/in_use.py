"""The chart of the memory in use during a step, on the time axis of the timeline above it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from markupsafe import Markup

from kitsune.errors import ChartError
from server.charts.drawing import axes
from server.charts.drawing.axes import Scale, finite, from_zero, span
from server.charts.drawing.layout import drawing
from server.charts.drawing.svg import WIDE_PX, empty, line, mark, path, responsive, steps, text, together
from server.charts.drawing.words import microseconds
from server.charts.timeline import plot_ends

TITLE: Final = "Memory in use during a step"
HEIGHT_PX: Final = 110.0
UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


@dataclass(frozen=True, slots=True)
class Used:
    """The memory in use from this moment on."""

    at_us: float
    used_bytes: int


def in_use(moments: Sequence[Used]) -> Markup:
    """The chart. The last moment is the end of the step. Raises ChartError for out-of-range or unsorted values."""
    if not moments:
        return empty(TITLE, "No launches of this step were recorded.")
    before_us = moments[0].at_us
    for each in moments:
        finite(each.used_bytes, "the memory in use")
        if finite(each.at_us, "a moment of the step") < before_us:
            raise ChartError("the memory in use", f"goes back in time from {before_us:g} to {each.at_us:g} µs")
        before_us = each.at_us
    return responsive(partial(draw, moments))


def draw(moments: Sequence[Used], width: int) -> Markup:
    size, unit = unit_of(max(each.used_bytes for each in moments))
    bottom = axes.HEAD_PX + HEIGHT_PX
    x = Scale(*span(each.at_us for each in moments), *plot_ends(width))
    y = from_zero((each.used_bytes / size for each in moments), bottom, axes.HEAD_PX)
    up = upwards(x, y, f"{unit}, of what the step itself makes", width)
    along = axes.along_bottom(x, axes.HEAD_PX, bottom, axes.ticks_along(x), "µs", width)
    places = [(x.place(each.at_us), y.place(each.used_bytes / size)) for each in moments]
    outline = [(places[0][0], bottom), *steps(seen(places)), (places[-1][0], bottom)]
    description = description_of(moments)
    curve = mark(description, path(outline, "used", is_closed=True))
    return drawing(TITLE, description, width, bottom, along, up, curve, note=description)


def upwards(x: Scale, y: Scale, title: str, width: int) -> Markup:
    """The vertical axis. Tick labels are beside the grid lines, or above them on a narrow drawing without margin."""
    ticks = axes.ticks_up(y)
    if width >= WIDE_PX:
        return axes.along_left(y, x.start_px, x.end_px, ticks, title)
    parts = [
        line(x.start_px, y.place(value), x.end_px, y.place(value), "grid")
        + text(x.start_px + 2, y.place(value) - 3, words, "muted")
        for value, words in ticks
    ]
    return together([*parts, text(0, y.end_px - 12, title, "muted", room_px=width)])


def seen(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The highest point of each pixel column, so that no peak is lost, and the last point."""
    highest = places[0]
    for place in places[1:]:
        if int(place[0]) != int(highest[0]):
            yield highest
            highest = place
        elif place[1] < highest[1]:
            highest = (highest[0], place[1])
    yield highest
    if places[-1] != highest:
        yield places[-1]


def unit_of(most_bytes: int) -> tuple[int, str]:
    return next((size, unit) for size, unit in UNITS if most_bytes >= size or size == 1)


def amount(used_bytes: int) -> str:
    size, unit = unit_of(used_bytes)
    return f"{used_bytes / size:,.{0 if size == 1 else 1}f}\N{NO-BREAK SPACE}{unit}"


def description_of(moments: Sequence[Used]) -> str:
    most = max(moments, key=lambda each: each.used_bytes)
    return f"At most {amount(most.used_bytes)} are in use, from {microseconds(most.at_us)} µs on."
