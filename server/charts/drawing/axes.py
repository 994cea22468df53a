"""Axes of charts: grid lines, tick labels and a title with the unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from server.charts.drawing.figures import round_numbers
from server.charts.drawing.scale import Scale
from server.charts.drawing.svg import element, line, text, together
from server.charts.drawing.text_width import width_px

TICK_ROOM_PX: Final = 76.0  # width for a tick label with margin, on the horizontal axis
ROW_ROOM_PX: Final = 44.0  # the same for the height, on the vertical axis
BETWEEN_PX: Final = 8.0  # minimum distance between two labels
BASE_PX: Final = 15.0  # from the plot to the tick labels below it
TITLE_PX: Final = 33.0  # from the plot to the title below it
HEAD_PX: Final = 26.0  # above a plot, for the title of the vertical axis
BELOW_PX: Final = 42.0  # below a plot, for tick labels and title

Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Plot:
    """A rectangle with a scale along the bottom and one up the left side."""

    x: Scale
    y: Scale

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.x.place(x), self.y.place(y)


def named(values: Sequence[float], unit: str = "") -> list[Tick]:
    return [(value, words + unit) for value, words in zip(values, round_numbers(values), strict=True)]


def ticks_along(scale: Scale) -> list[Tick]:
    return named(scale.ticks(count_along(scale)))


def ticks_up(scale: Scale, unit: str = "") -> list[Tick]:
    return named(scale.ticks(max(2, int((scale.start_px - scale.end_px) / ROW_ROOM_PX))), unit)


def count_along(scale: Scale) -> int:
    """How many ticks fit on the horizontal axis."""
    return max(2, int((scale.end_px - scale.start_px) / TICK_ROOM_PX))


def left_of(ticks: Sequence[Tick]) -> float:
    """The left margin of a plot that these tick labels need."""
    return max((width_px(words) for _, words in ticks), default=0.0) + BETWEEN_PX


def along_bottom(scale: Scale, top: float, bottom: float, ticks: Sequence[Tick], title: str, width: float) -> Markup:
    """The horizontal axis: vertical grid lines, the labels below them that do not overlap, and a centred title."""
    parts = [line(scale.place(value), top, scale.place(value), bottom, "grid") for value, _ in ticks]
    taken = 0.0
    for value, words in ticks:
        half = width_px(words) / 2
        middle = min(max(scale.place(value), half), width - half)
        if middle - half >= taken:
            parts.append(text(middle, bottom + BASE_PX, words, "muted", "middle"))
            taken = middle + half + BETWEEN_PX
    title = titled(scale, title)
    half = min(width, width_px(title)) / 2
    middle = min(max((scale.start_px + scale.end_px) / 2, half), width - half)
    return element("g", *parts, text(middle, bottom + TITLE_PX, title, "muted", "middle", room_px=width))


def along_left(scale: Scale, left: float, right: float, ticks: Sequence[Tick], title: str) -> Markup:
    """The vertical axis: horizontal grid lines, labels beside them, and the title above, not rotated."""
    parts = [
        together(
            (
                line(left, scale.place(value), right, scale.place(value), "grid"),
                text(left - BETWEEN_PX + 2, scale.place(value) + 4, words, "muted", "end"),
            )
        )
        for value, words in ticks
    ]
    return element("g", *parts, text(0, scale.end_px - 12, titled(scale, title), "muted", room_px=right))


def titled(scale: Scale, title: str) -> str:
    return f"{title}, logarithmic" if scale.is_log else title
