"""The plot area of charts with speedups on the vertical axis. Its range includes all whiskers and 1, no gain."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from markupsafe import Markup

from server.charts.drawing import axes, marks
from server.charts.drawing.axes import Plot, Tick, fitting, linear
from server.charts.drawing.layout import Entry
from server.charts.drawing.svg import line

NO_GAIN: Final = 1.0
TIMES: Final = "\N{MULTIPLICATION SIGN}"


class Bounded(Protocol):
    """Anything with an interval, or without one."""

    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def plot_of(along: Iterable[float], speedups: Iterable[float | None], width: int, height_px: float) -> Plot:
    known = [NO_GAIN, *(each for each in speedups if each is not None)]
    up = fitting(known, axes.HEAD_PX + height_px, axes.HEAD_PX)
    return Plot(linear(along, *axes.ends_beside(up, width, TIMES)), up)


def ground(plot: Plot, ticks: Sequence[Tick], titles: tuple[str, str], bottom: float, width: int) -> Markup:
    """Both axes, and a reference line at no gain. `bottom`: where the labels below the plot begin."""
    (left, top, right, _), level = plot.box, plot.y.place(NO_GAIN)
    along = axes.along_bottom(plot.x, top, bottom, ticks, titles[0], width)
    up = axes.along_left(plot.y, left, right, axes.ticks_up(plot.y, TIMES), titles[1])
    return along + up + line(left, level, right, level, "reference")


def whisker(bounded: Bounded, x: float, plot: Plot) -> Markup:
    if bounded.low is None or bounded.high is None:
        return Markup("")
    return marks.whisker(plot.y.place(bounded.low), plot.y.place(bounded.high), x, is_upright=True)


def interval_entries(shown: Iterable[Bounded], no_gain: str) -> Iterator[Entry]:
    """The legend of whiskers if there are any, and of the reference line."""
    if any(each.low is not None and each.high is not None for each in shown):
        yield lambda x, y: marks.whisker(y - 7, y + 7, x, is_upright=True), "95 % interval"
    yield lambda x, y: line(x - 8, y, x + 8, y, "reference"), no_gain
