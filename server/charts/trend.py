"""The chart of the speedups of a model's plans over time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from markupsafe import Markup

from server.charts.drawing import axes, words
from server.charts.drawing.axes import DAY, check_finite, date_ticks, in_utc
from server.charts.drawing.layout import Entry, drawing
from server.charts.drawing.marks import Thinned, shape, thinned
from server.charts.drawing.svg import WIDE_PX, empty, mark, path, responsive
from server.charts.speedups import ground, interval_entries, plot_of, whisker

TITLE: Final = "Speedup of the plan, run by run"


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """A run that ended at `at`; `value` is the speedup of its plan, with the interval from `low` to `high`."""

    at: datetime
    value: float
    low: float | None
    high: float | None
    label: str
    href: str

    @property
    def at_s(self) -> float:
        return in_utc(self.at).timestamp()

    @property
    def tooltip(self) -> str:
        gain = f"{words.gain(self.value)}{words.interval(self.low, self.high, words.gain)}"
        return f"{self.label}, {words.moment(in_utc(self.at))}: {gain}"


def trend(moments: Sequence[TrendPoint]) -> Markup:
    """The chart. Raises ChartError for numbers out of range."""
    if not moments:
        return empty(TITLE, "No run of this model has a plan yet.")
    for moment in moments:
        check_finite((moment.value, moment.low, moment.high), f"the speedup of {moment.label!r}")
    return responsive(partial(draw, sorted(moments, key=lambda moment: moment.at_s)))


def draw(moments: Sequence[TrendPoint], width: int) -> Markup:
    ends = [end for moment in moments for end in (moment.value, moment.low, moment.high)]
    plot = plot_of(stretch(moments), ends, width, 220.0 if width >= WIDE_PX else 180.0)
    places = [plot.place(moment.at_s, moment.value) for moment in moments]
    few = thinned(places)
    ticks = date_ticks(plot.x.low, plot.x.high, axes.count_along(plot.x))
    return drawing(
        TITLE,
        description_of(moments, few),
        width,
        plot.y.start_px,
        ground(plot, ticks, (f"end of the run, UTC, {years(moments)}", "times as fast"), plot.y.start_px, width),
        path([places[index] for index in few.drawn], "thread"),
        *(whisker(moments[index], places[index][0], plot) for index in few.drawn),
        *(draw_moment(moments[index], places[index]) for index in few.drawn),
        entries=entries(moments),
        note=few.note("runs"),
        has_links=any(moment.href for moment in moments),
    )


def stretch(moments: Sequence[TrendPoint]) -> tuple[float, float]:
    """The range from the first to the last moment, at least a day, in seconds."""
    first, last = moments[0].at_s, moments[-1].at_s
    missing = max(0.0, DAY - (last - first))
    return first - missing / 2, last + missing / 2


def years(moments: Sequence[TrendPoint]) -> str:
    """ "2026", or "2026 to 2027"."""
    return " to ".join(dict.fromkeys(str(in_utc(each.at).year) for each in (moments[0], moments[-1])))


def draw_moment(moment: TrendPoint, place: tuple[float, float]) -> Markup:
    return mark(moment.tooltip, shape("circle", *place, "series-1"), href=moment.href)


def entries(moments: Sequence[TrendPoint]) -> Iterator[Entry]:
    yield lambda x, y: shape("circle", x, y, "series-1"), "a run"
    yield from interval_entries(moments, "no gain")


def description_of(moments: Sequence[TrendPoint], few: Thinned) -> str:
    head = f"{words.count(len(moments), 'run')}."
    return words.joined(head, words.listed([each.tooltip for each in moments]), few.note("runs"))
