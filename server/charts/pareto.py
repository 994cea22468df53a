"""The chart of step time against peak memory, with the Pareto front as a line."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from markupsafe import Markup

from server.charts.drawing import axes, words
from server.charts.drawing.axes import Plot, finite, fitting
from server.charts.drawing.layout import Entry, drawing
from server.charts.drawing.marks import Label, Thinned, labels, shape, thinned
from server.charts.drawing.svg import WIDE_PX, empty, mark, path, responsive, steps

TITLE: Final = "Step time against peak memory; less is better in both"
MIB: Final = 2**20
NAMED_ON_THE_FRONT: Final = 6
#: Role of a point -> shape, size in px, meaning in the legend.
ROLES: Final = {
    "chosen": ("star", 7.0, "the plan"),
    "baseline": ("square", 6.0, "as given"),
    "front": ("circle", 5.0, "nothing is better in both"),
    "behind": ("circle", 4.0, "something else is better"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration. `href`: a link to it, or empty. `name`, or else `label`, is written beside its mark."""

    label: str
    step_ms: float
    peak_bytes: int
    href: str
    is_chosen: bool
    is_baseline: bool
    name: str = ""

    @property
    def figures(self) -> str:
        return f"{words.ms(self.step_ms)}, {words.mebibytes(self.peak_bytes)}"


def pareto(points: Sequence[Point]) -> Markup:
    """The chart. Raises ChartError for numbers out of range."""
    if not points:
        return empty(TITLE, "No configuration was measured yet.")
    for point in points:
        finite(point.step_ms, f"the step time of {point.label!r}")
        finite(point.peak_bytes, f"the peak memory of {point.label!r}")
    ahead = front(points)
    return responsive(partial(draw, points, ahead, roles_of(points, set(ahead))))


def front(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other one dominates (as good in both and better in one), the fastest first."""
    order = sorted(range(len(points)), key=lambda index: (points[index].step_ms, points[index].peak_bytes))
    found: list[int] = []
    for index in order:
        here, last = points[index], points[found[-1]] if found else None
        is_same = last is not None and (here.step_ms, here.peak_bytes) == (last.step_ms, last.peak_bytes)
        if last is None or here.peak_bytes < last.peak_bytes or is_same:
            found.append(index)
    return found


def roles_of(points: Sequence[Point], ahead: Collection[int]) -> list[str]:
    found = ["front" if index in ahead else "behind" for index in range(len(points))]
    for index, point in enumerate(points):
        if point.is_baseline or point.is_chosen:
            found[index] = "chosen" if point.is_chosen else "baseline"
    return found


def draw(points: Sequence[Point], ahead: Sequence[int], roles: Sequence[str], width: int) -> Markup:
    plot = plot_of(points, width)
    places = [plot.place(point.step_ms, point.peak_bytes / MIB) for point in points]
    few = thinned(places, kept=[index for index, role in enumerate(roles) if role != "behind"])
    # The more important roles are drawn last, on top.
    order = sorted(few.drawn, key=lambda index: list(ROLES).index(roles[index]), reverse=True)
    left, top, right, bottom = plot.box
    corners = stairs([places[index] for index in ahead], top, right)
    return drawing(
        TITLE,
        description_of(points, ahead, roles, few),
        width,
        bottom,
        axes.along_bottom(plot.x, top, bottom, axes.ticks_along(plot.x), "ms per step", width),
        axes.along_left(plot.y, left, right, axes.ticks_up(plot.y), "peak memory, MiB"),
        path(corners, "best"),
        *(draw_point(points[index], places[index], roles[index]) for index in order),
        labels(named(points, ahead, places), [places[index] for index in order], corners, plot.box),
        entries=entries(set(roles)),
        note=few.note("configurations"),
        has_links=any(point.href for point in points),
    )


def plot_of(points: Sequence[Point], width: int) -> Plot:
    bottom = axes.HEAD_PX + (300.0 if width >= WIDE_PX else 240.0)
    up = fitting((point.peak_bytes / MIB for point in points), bottom, axes.HEAD_PX)
    return Plot(fitting((point.step_ms for point in points), *axes.ends_beside(up, width)), up)


def stairs(front_px: Sequence[tuple[float, float]], top: float, right: float) -> list[tuple[float, float]]:
    """Corners of the front: between two of its points, the faster one has the least memory for that time."""
    return [(front_px[0][0], top), *steps(front_px), (right, front_px[-1][1])]


def draw_point(point: Point, place: tuple[float, float], what: str) -> Markup:
    name, radius_px, _ = ROLES[what]
    return mark(tooltip_of(point, what), shape(name, *place, what, radius_px), href=point.href)


def tooltip_of(point: Point, what: str) -> str:
    return f"{point.label}: {point.figures} ({ROLES[what][2]})"


def named(points: Sequence[Point], ahead: Sequence[int], places: Sequence[tuple[float, float]]) -> Iterator[Label]:
    """Labels for the plan and the baseline, then for the first points of the front."""
    ends = [index for index, point in enumerate(points) if point.is_chosen or point.is_baseline]
    for index in [*ends, *(index for index in ahead[:NAMED_ON_THE_FRONT] if index not in ends)]:
        yield Label(points[index].name or points[index].label, *places[index])


def entries(roles: set[str]) -> Iterator[Entry]:
    for what, (name, _, meaning) in ROLES.items():
        if what in roles:
            yield partial(shape, name, css=what), meaning
    yield (
        lambda x, y: path([(x - 8, y - 4), (x, y - 4), (x, y + 4), (x + 8, y + 4)], "best"),
        "the least memory for a time",
    )


def description_of(points: Sequence[Point], ahead: Sequence[int], roles: Sequence[str], few: Thinned) -> str:
    """The chart as text; points of the front come first."""
    found = set(ahead)
    order = [*ahead, *(index for index in range(len(points)) if index not in found)]
    sentences = words.listed([tooltip_of(points[index], roles[index]) for index in order])
    return words.joined(f"{words.count(len(points), 'configuration')}.", sentences, few.note("configurations"))
