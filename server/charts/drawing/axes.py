"""Axes of charts: scales from values to pixels, round ticks, grid lines, tick labels and a title with the unit."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup

from kitsune.errors import ChartError
from server.charts.drawing.svg import element, line, text, width_px
from server.charts.drawing.words import round_numbers

LARGEST: Final = 1e15  # far above all measurements; beyond it neighbouring ticks are the same float
SMALLEST_SPAN: Final = 1e-9  # relative to the largest value; a smaller span is drawn as if all values were equal
STEPS: Final = (1.0, 2.0, 5.0, 10.0)
PADDING: Final = 0.05  # of the span, on both sides
LOG_FROM: Final = 20.0  # ratio of largest to smallest value from which on a scale is logarithmic
FEW_DECADES: Final = 2.0

MINUTE, HOUR, DAY = 60, 3600, 86_400
MONTH: Final = 30 * DAY
#: Steps in seconds for ticks at full minutes, hours or days.
TIME_STEPS: Final = (
    *(n * MINUTE for n in (1, 5, 15, 30)),
    *(n * HOUR for n in (1, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14)),
)
MONTH_STEPS: Final = (1, 3, 6, 12, 24, 60, 120, 240, 600, 1200)

TICK_ROOM_PX: Final = 76.0  # width for a tick label with margin, on the horizontal axis
ROW_ROOM_PX: Final = 44.0  # the same for the height, on the vertical axis
BETWEEN_PX: Final = 8.0  # minimum distance between two labels
BASE_PX: Final = 15.0  # from the plot to the tick labels below it
TITLE_PX: Final = 33.0  # from the plot to the title below it
HEAD_PX: Final = 26.0  # above a plot, for the title of the vertical axis
EDGE_PX: Final = 12.0  # right of a plot

Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low` to `start_px` and `high` to `end_px`. On a vertical axis `start_px` is larger: y grows downwards."""

    low: float
    high: float
    start_px: float
    end_px: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, here = (self._measure(each) for each in (self.low, self.high, value))
        return self.start_px + (here - low) / (high - low) * (self.end_px - self.start_px)

    def ticks(self, count: int) -> list[float]:
        """About `count` round numbers between low and high."""
        return log_ticks(self.low, self.high) if self.is_log else nice_ticks(self.low, self.high, count)

    def _measure(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def linear(values: Iterable[float], start_px: float, end_px: float) -> Scale:
    """A linear scale over the values, with padding. Raises ChartError."""
    low, high = span(values)
    air = (high - low) * PADDING
    return Scale(low - air, high + air, start_px, end_px)


def from_zero(values: Iterable[float], start_px: float, end_px: float) -> Scale:
    """A linear scale that includes zero, for bars. Raises ChartError."""
    low, high = span([0.0, *values])
    return Scale(low, high, start_px, end_px)


def fitting(values: Iterable[float], start_px: float, end_px: float) -> Scale:
    """A logarithmic scale if all values are positive and their ratio is large, else linear. Raises ChartError."""
    low, high = span(known := list(values))
    if not known or min(known) <= 0 or high / low < LOG_FROM:
        return linear(known, start_px, end_px)
    air = (high / low) ** PADDING
    return Scale(low / air, high * air, start_px, end_px, is_log=True)


def span(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest value; widened if they are equal, (0, 1) widened without values."""
    known = [finite(value, "a value") for value in values] or [0.0, 1.0]
    low, high = min(known), max(known)
    largest = max(abs(low), abs(high))
    if high - low > largest * SMALLEST_SPAN:
        return low, high
    air = largest / 10 or 1.0
    return low - air, high + air


def finite(value: float, what: str) -> float:
    """The value itself. Raises ChartError if it is not finite, or too large for a scale."""
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ChartError(what, f"is {value}; only numbers between -{LARGEST:g} and {LARGEST:g} have a place on a scale")
    return value


def check_finite(values: Iterable[float | None], what: str) -> None:
    """Raises ChartError as `finite` does; None is a value that is not known."""
    for value in values:
        if value is not None:
            finite(value, what)


def nice_step(rough: float) -> float:
    """The number 1, 2 or 5 times a power of ten with the smallest ratio to `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min(STEPS, key=lambda step: abs(math.log(step * power / rough)))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    step = nice_step((high - low) / max(1, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int) -> list[float]:
    """Like `nice_ticks`, but integers."""
    step = nice_step(max(1.0, (high - low) / max(1, count)))
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; over few decades also 2 and 5 times these."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0, 2.0, 5.0) if math.log10(high / low) <= FEW_DECADES else (1.0,)
    every = (step * 10.0**power for power in range(first, last + 1) for step in steps)
    return [value for value in every if low <= value <= high]


def in_utc(at: datetime) -> datetime:
    """In UTC. A time without a zone is UTC already, as the database stores it."""
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def date_ticks(low_s: float, high_s: float, count: int) -> list[Tick]:
    """About `count` ticks between two times in seconds since 1970."""
    rough_s = (high_s - low_s) / max(1, count)
    every_s = (*TIME_STEPS, *(months * MONTH for months in MONTH_STEPS))
    nearest = min(range(len(every_s)), key=lambda index: abs(math.log(every_s[index] / rough_s)))
    if nearest >= len(TIME_STEPS):
        return list(month_ticks(low_s, high_s, MONTH_STEPS[nearest - len(TIME_STEPS)]))
    step = TIME_STEPS[nearest]
    first, last = math.ceil(low_s / step), math.floor(high_s / step)
    moments = (datetime.fromtimestamp(index * step, UTC) for index in range(first, last + 1))
    return [(moment.timestamp(), f"{moment:%d %b}" if step >= DAY else hour(moment)) for moment in moments]


def hour(moment: datetime) -> str:
    """The time of day; for midnight the date."""
    return f"{moment:%H:%M}" if moment.hour or moment.minute else f"{moment:%d %b}"


def month_ticks(low_s: float, high_s: float, step: int) -> Iterator[Tick]:
    """Ticks every `step` months, counted from the year 0; labelled with the year alone from twelve months on."""
    low, high = (datetime.fromtimestamp(each, UTC) for each in (low_s, high_s))
    for months in range(low.year * 12 // step * step, high.year * 12 + 12, step):
        moment = datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)
        if low <= moment <= high:
            yield moment.timestamp(), f"{moment:%Y}" if step >= 12 else f"{moment:%b %Y}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A rectangle with a scale along the bottom and one up the left side."""

    x: Scale
    y: Scale

    def place(self, x: float, y: float) -> tuple[float, float]:
        return self.x.place(x), self.y.place(y)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.x.start_px, self.y.end_px, self.x.end_px, self.y.start_px


def named(values: Sequence[float], unit: str = "") -> list[Tick]:
    return [(value, words + unit) for value, words in zip(values, round_numbers(values), strict=True)]


def ticks_along(scale: Scale) -> list[Tick]:
    return named(scale.ticks(count_along(scale)))


def ticks_up(scale: Scale, unit: str = "") -> list[Tick]:
    return named(scale.ticks(max(2, int((scale.start_px - scale.end_px) / ROW_ROOM_PX))), unit)


def count_along(scale: Scale) -> int:
    """How many ticks fit on the horizontal axis."""
    return max(2, int((scale.end_px - scale.start_px) / TICK_ROOM_PX))


def ends_beside(up: Scale, width: float, unit: str = "") -> tuple[float, float]:
    """Start and end of the horizontal axis in px. The left margin depends on the tick labels of the vertical axis."""
    widest = max((width_px(words) for _, words in ticks_up(up, unit)), default=0.0)
    return widest + BETWEEN_PX, width - EDGE_PX


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
        line(left, scale.place(value), right, scale.place(value), "grid")
        + text(left - BETWEEN_PX + 2, scale.place(value) + 4, words, "muted", "end")
        for value, words in ticks
    ]
    return element("g", *parts, text(0, scale.end_px - 12, titled(scale, title), "muted", room_px=right))


def titled(scale: Scale, title: str) -> str:
    return f"{title}, logarithmic" if scale.is_log else title
