"""The plot area of charts with speedups on the vertical axis. Its range includes all whiskers and 1, no gain."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from markupsafe import Markup

from server.charts.drawing import axes
from server.charts.drawing.axes import Plot, Tick
from server.charts.drawing.marks import whisker_along_y
from server.charts.drawing.scale import fitting, linear
from server.charts.drawing.svg import line, together

NO_GAIN: Final = 1.0
TIMES: Final = "\N{MULTIPLICATION SIGN}"
EDGE_PX: Final = 12.0


class Bounded(Protocol):
    """Anything with an interval, or without one."""

    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def plot_of(along: Iterable[float], speedups: Iterable[float | None], width: int, height_px: float) -> Plot:
    """The left margin depends on the width of the speedup labels."""
    known = [NO_GAIN, *(each for each in speedups if each is not None)]
    up = fitting(known, axes.HEAD_PX + height_px, axes.HEAD_PX)
    return Plot(linear(along, axes.left_of(axes.ticks_up(up, TIMES)), width - EDGE_PX), up)


def ground(plot: Plot, ticks: Sequence[Tick], titles: tuple[str, str], bottom: float, width: int) -> Markup:
    """Both axes, and a reference line at no gain. `bottom`: where the labels below the plot begin."""
    left, right, level = plot.x.start_px, plot.x.end_px, plot.y.place(NO_GAIN)
    return together(
        (
            axes.along_bottom(plot.x, plot.y.end_px, bottom, ticks, titles[0], width),
            axes.along_left(plot.y, left, right, axes.ticks_up(plot.y, TIMES), titles[1]),
            line(left, level, right, level, "reference"),
        )
    )


def whisker(bounded: Bounded, x: float, plot: Plot) -> Markup:
    if bounded.low is None or bounded.high is None:
        return Markup("")
    return whisker_along_y(plot.y.place(bounded.low), plot.y.place(bounded.high), x)


def has_whisker(bounded: Bounded) -> bool:
    return bounded.low is not None and bounded.high is not None


def symbol_of_whisker(x: float, y: float) -> Markup:
    """The whisker of a legend."""
    return whisker_along_y(y - 7, y + 7, x)


def symbol_of_no_gain(x: float, y: float) -> Markup:
    return line(x - 8, y, x + 8, y, "reference")
