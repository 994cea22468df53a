"""The chart of all measured blocks: a row for each arm, a dot for each block, the first block at the top of its row.

Noise shows as a cloud, and drift during the measurement as a slope.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles
from typing import Final

from markupsafe import Markup

from server.charts.drawing import axes, words
from server.charts.drawing.axes import Scale, check_finite, linear
from server.charts.drawing.layout import BAND_PX, Rows, drawing, rows_of
from server.charts.drawing.marks import Thinned, shape, thinned
from server.charts.drawing.svg import empty, line, mark, rect, responsive

TITLE: Final = "Every measured block, in ms per step"
DOT_PX: Final = 2.5
NO_BLOCKS: Final = "no blocks"


@dataclass(frozen=True, slots=True)
class Strip:
    """An arm, and the time of a step in each of its blocks, in the order of measurement."""

    label: str
    values_ms: Sequence[float]


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Quartiles of an arm, by linear interpolation (method 7 of Hyndman & Fan 1996)."""

    low_ms: float
    median_ms: float
    high_ms: float


def samples(strips: Sequence[Strip]) -> Markup:
    """The chart. Raises ChartError for numbers out of range."""
    if not any(strip.values_ms for strip in strips):
        return empty(TITLE, "No block was measured yet.")
    for strip in strips:
        check_finite(strip.values_ms, f"a block of {strip.label!r}")
    return responsive(partial(draw, strips))


def quartiles(values_ms: Sequence[float]) -> Quartiles | None:
    """None without values."""
    if not values_ms:
        return None
    if len(values_ms) == 1:
        return Quartiles(values_ms[0], values_ms[0], values_ms[0])
    return Quartiles(*quantiles(values_ms, n=4, method="inclusive"))


def draw(strips: Sequence[Strip], width: int) -> Markup:
    rows = rows_of(width, [""] * len(strips))
    scale = linear((value for strip in strips for value in strip.values_ms), rows.left, rows.right)
    found = [quartiles(strip.values_ms) for strip in strips]
    places = dots(strips, rows, scale)
    few = thinned([place for _, place in places])
    return drawing(
        TITLE,
        description_of(strips, found, few),
        width,
        rows.bottom,
        axes.along_bottom(scale, 0, rows.bottom, axes.ticks_along(scale), "ms per step", width),
        *(row_of(strip, found[row], row, rows, scale) for row, strip in enumerate(strips)),
        *(mark(places[index][0], shape("circle", *places[index][1], "block", DOT_PX)) for index in few.drawn),
        *(middle(each, row, rows, scale) for row, each in enumerate(found)),
        entries=ENTRIES,
        note=few.note("blocks"),
    )


def dots(strips: Sequence[Strip], rows: Rows, scale: Scale) -> list[tuple[str, tuple[float, float]]]:
    """The text and the place of each block: x by its time, y by its order."""
    found = []
    for row, strip in enumerate(strips):
        top, room = rows.band(row) + DOT_PX, BAND_PX - 2 * DOT_PX
        for turn, value in enumerate(strip.values_ms):
            down = turn / (len(strip.values_ms) - 1) if len(strip.values_ms) > 1 else 0.5
            tooltip = f"{strip.label}, block {turn + 1}: {words.ms(value)}"
            found.append((tooltip, (scale.place(value), top + down * room)))
    return found


def row_of(strip: Strip, found: Quartiles | None, row: int, rows: Rows, scale: Scale) -> Markup:
    """The labels of a row, and the interquartile range as a box behind the dots."""
    if found is None:
        return mark(tooltip_of(strip, found), rows.words(row, strip.label, NO_BLOCKS))
    low, high = scale.place(found.low_ms), scale.place(found.high_ms)
    box = rect(low, rows.band(row), max(high - low, 1.0), BAND_PX, "quartiles")
    return mark(tooltip_of(strip, found), rows.words(row, strip.label, words.ms(found.median_ms)), box)


def middle(found: Quartiles | None, row: int, rows: Rows, scale: Scale) -> Markup:
    if found is None:
        return Markup("")
    x, top = scale.place(found.median_ms), rows.band(row)
    return line(x, top - 3, x, top + BAND_PX + 3, "median")


def tooltip_of(strip: Strip, found: Quartiles | None) -> str:
    if found is None:
        return f"{strip.label}: {NO_BLOCKS}"
    return (
        f"{strip.label}: median {words.ms(found.median_ms)} of {words.count(len(strip.values_ms), 'block')}, "
        f"half of them within {words.ms(found.low_ms)} and {words.ms(found.high_ms)}, "
        f"all within {words.ms(min(strip.values_ms))} and {words.ms(max(strip.values_ms))}"
    )


def description_of(strips: Sequence[Strip], found: Sequence[Quartiles | None], few: Thinned) -> str:
    return words.joined(
        words.listed([tooltip_of(*each) for each in zip(strips, found, strict=True)]), few.note("blocks")
    )


ENTRIES: Final = (
    (lambda x, y: shape("circle", x, y, "block", DOT_PX), "a block; the first at the top of its row"),
    (lambda x, y: line(x, y - 8, x, y + 8, "median"), "median"),
    (lambda x, y: rect(x - 7, y - 6, 14, 12, "quartiles"), "the middle half"),
)
