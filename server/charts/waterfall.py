"""The waterfall chart: how much time each change of a training step saved or cost, between two totals.

`ms` of a step or of the remainder is the change of the step's time, negative where it saves. A bar begins where the
previous one ends, and the last total is the first one plus all changes. `low_ms` and `high_ms` bound `ms`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from markupsafe import Markup

from kitsune.errors import ChartError
from server.charts.drawing import axes, words
from server.charts.drawing.axes import Scale, check_finite, from_zero
from server.charts.drawing.layout import BAND_PX, Entry, Rows, drawing, rows_of
from server.charts.drawing.marks import whisker
from server.charts.drawing.svg import empty, line, mark, rect, responsive

TITLE: Final = "What each change of the step saves"
CLOSES_WITHIN: Final = 1e-3  # share of the larger total that rounding may leave open
LEAST_PX: Final = 1.5  # a narrower bar would not be visible
MEANINGS: Final = {
    "total": "time of a step",
    "saved": "saves time",
    "cost": "costs time",
    "remainder": "what the changes do together",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A total, or a change (negative where it saves time). `note` is written in small letters below it."""

    label: str
    ms: float
    low_ms: float | None
    high_ms: float | None
    kind: Literal["total", "step", "remainder"]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PlacedBar:
    """A bar with its begin and end on the axis, and its whisker around the end. `share`: of the first total."""

    bar: Bar
    begin_ms: float
    end_ms: float
    whisker_ms: tuple[float, float] | None
    share: float

    @property
    def css(self) -> str:
        if self.bar.kind == "step":
            return "cost" if self.bar.ms > 0 else "saved"
        return self.bar.kind

    @property
    def figure(self) -> str:
        """The time or its change, and the change as a percentage of the first total (none for that total itself)."""
        text = words.ms(self.bar.ms) if self.bar.kind == "total" else words.change_ms(self.bar.ms)
        return f"{text} ({words.change_percent(self.share)})" if self.share or self.bar.kind != "total" else text

    @property
    def tooltip(self) -> str:
        formatted = words.ms if self.bar.kind == "total" else words.change_ms
        note = f"; {self.bar.note}" if self.bar.note else ""
        return f"{self.bar.label}: {self.figure}{words.interval(self.bar.low_ms, self.bar.high_ms, formatted)}{note}"


def waterfall(bars: Sequence[Bar]) -> Markup:
    """The chart. Raises ChartError if the first or last bar is no total, or the changes do not add up to the last."""
    if not bars:
        return empty(TITLE, "Nothing was measured yet.")
    return responsive(partial(draw, list(placed(bars))))


def placed(bars: Sequence[Bar]) -> Iterator[PlacedBar]:
    """Each bar with its begin and end. Raises ChartError as `waterfall` does."""
    first, at_ms = bars[0].ms, 0.0
    for number, bar in enumerate(bars):
        check(bar, is_end=number in (0, len(bars) - 1))
        if bar.kind == "total" and number:
            check_closed(bar, at_ms, first)
        begin_ms = 0.0 if bar.kind == "total" else at_ms
        change_ms = bar.ms - first if bar.kind == "total" else bar.ms
        known = bar.low_ms is not None and bar.high_ms is not None
        ends_ms = (begin_ms + (bar.low_ms or 0.0), begin_ms + (bar.high_ms or 0.0)) if known else None
        yield PlacedBar(bar, begin_ms, at_ms := begin_ms + bar.ms, ends_ms, change_ms / first)


def check(bar: Bar, *, is_end: bool) -> None:
    check_finite((bar.ms, bar.low_ms, bar.high_ms), f"the bar {bar.label!r}")
    if bar.kind == "total" and bar.ms <= 0:
        raise ChartError(f"the bar {bar.label!r}", f"is a total of {bar.ms} ms; a step takes some time")
    if is_end and bar.kind != "total":
        raise ChartError(f"the bar {bar.label!r}", "is the first or the last one, which must be totals")


def check_closed(bar: Bar, at_ms: float, first_ms: float) -> None:
    if abs(bar.ms - at_ms) > CLOSES_WITHIN * max(first_ms, bar.ms):
        raise ChartError(
            f"the total {bar.label!r}",
            f"is {bar.ms:g} ms, but the bars before it lead to {at_ms:g} ms; add a bar for the remainder",
        )


def draw(bars: Sequence[PlacedBar], width: int) -> Markup:
    rows = rows_of(width, [each.bar.note for each in bars])
    ends = [end for each in bars for end in (each.begin_ms, each.end_ms, *(each.whisker_ms or ()))]
    scale = from_zero(ends, rows.left, rows.right)
    return drawing(
        TITLE,
        words.listed([each.tooltip for each in bars]),
        width,
        rows.bottom,
        axes.along_bottom(scale, 0, rows.bottom, axes.ticks_along(scale), "ms per step", width),
        *(joint(each, row, rows, scale) for row, each in enumerate(bars[1:], 1)),
        *(row_of(each, row, rows, scale) for row, each in enumerate(bars)),
        entries=entries(bars),
    )


def joint(bar: PlacedBar, row: int, rows: Rows, scale: Scale) -> Markup:
    """The connector from the end of the bar above to the begin of this one, or to the end of a total."""
    x = scale.place(bar.end_ms if bar.bar.kind == "total" else bar.begin_ms)
    return line(x, rows.band(row - 1) + BAND_PX, x, rows.band(row), "joint")


def row_of(bar: PlacedBar, row: int, rows: Rows, scale: Scale) -> Markup:
    top, ends = rows.band(row), sorted((scale.place(bar.begin_ms), scale.place(bar.end_ms)))
    whisker_px = (scale.place(bar.whisker_ms[0]), scale.place(bar.whisker_ms[1])) if bar.whisker_ms else None
    return mark(
        bar.tooltip,
        rows.words(row, bar.bar.label, bar.figure, bar.bar.note),
        rect(ends[0], top, max(ends[1] - ends[0], LEAST_PX), BAND_PX, bar.css),
        whisker(*whisker_px, top + BAND_PX / 2) if whisker_px else "",
    )


def entries(bars: Sequence[PlacedBar]) -> Iterator[Entry]:
    used = {each.css for each in bars}
    for css, meaning in MEANINGS.items():
        if css in used:
            yield partial(symbol, css), meaning
    if any(each.whisker_ms for each in bars):
        yield lambda x, y: whisker(x - 7, x + 7, y), "95 % interval"


def symbol(css: str, x: float, y: float) -> Markup:
    return rect(x - 7, y - 5, 14, 10, css)
