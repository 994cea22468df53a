"""Marks for measurements, whiskers for their intervals, and labels beside them.

Series differ in shape as well as in colour, so that the charts do not depend on colour. Of marks that overlap one is
drawn, and the chart says so. Labels cover no mark, line or other label; those that do not fit are left out, and the
name is still shown as the tooltip of its mark.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from server.charts.drawing.svg import SIZE_PX, cut, element, line, path, text, together, width_px

RADIUS_PX: Final = 4.5
CAP_PX: Final = 4.0
#: Corners of shapes: angle in degrees from the top, and distance in multiples of the radius.
CORNERS: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "square": tuple((45.0 + 90 * index, 1.25) for index in range(4)),
    "triangle": tuple((120.0 * index, 1.3) for index in range(3)),
    "diamond": tuple((90.0 * index, 1.35) for index in range(4)),
    "wedge": tuple((180 + 120.0 * index, 1.3) for index in range(3)),
    "star": tuple((36.0 * index, 0.75 if index % 2 else 1.7) for index in range(10)),
}
#: Shapes of series, in the order in which they are assigned.
SHAPES: Final = ("circle", "square", "triangle", "diamond", "wedge", "star")

AT_MOST: Final = 600  # marks; a drawing of them is about 100 KB
FIRST_CELL_PX: Final = 2.0
COARSER: Final = 1.25

AWAY_PX: Final = 10.0  # from a mark to its label
MARK_PX: Final = 5.0
LONGEST_PX: Final = 150.0

Box = tuple[float, float, float, float]  # left, top, right, bottom


def shape(name: str, x: float, y: float, css: str, radius_px: float = RADIUS_PX) -> Markup:
    """A mark around a point. A cross is two strokes, all others are areas."""
    if name == "circle":
        return element("circle", cx=x, cy=y, r=radius_px, class_=css)
    if name == "cross":
        return cross(x, y, css, radius_px * 0.8)
    corners = ((math.radians(degrees), share * radius_px) for degrees, share in CORNERS[name])
    return path(((x + math.sin(turn) * far, y - math.cos(turn) * far) for turn, far in corners), css, is_closed=True)


def cross(x: float, y: float, css: str, reach_px: float) -> Markup:
    strokes = (line(x - reach_px, y - side, x + reach_px, y + side, css) for side in (-reach_px, reach_px))
    return element("g", *strokes)


def whisker(low_px: float, high_px: float, middle_px: float, *, is_upright: bool = False) -> Markup:
    """An error bar with caps, on a light outline that sets it off from bars. `middle_px`: where it lies across."""

    def corner(along: float, across: float) -> str:
        x, y = (middle_px + across, along) if is_upright else (along, middle_px + across)
        return f"{x:.2f} {y:.2f}"

    caps = ((end, -CAP_PX, end, CAP_PX) for end in (low_px, high_px))
    strokes = [(low_px, 0.0, high_px, 0.0), *caps]
    route = " ".join(f"M{corner(x1, y1)} L{corner(x2, y2)}" for x1, y1, x2, y2 in strokes)
    return together(element("path", d=route, class_=css) for css in ("halo", "whisker"))


@dataclass(frozen=True, slots=True)
class Thinned:
    """The indices to draw, sorted; each of the others lies within `within_px` of one of them."""

    drawn: tuple[int, ...]
    left_out: int
    within_px: int

    def note(self, many: str) -> str:
        """A note for the reader; "" if all are drawn."""
        if not self.left_out:
            return ""
        whole = len(self.drawn) + self.left_out
        return (
            f"Drawn are {len(self.drawn):,} of {whole:,} {many}: "
            f"each of the others lies within {self.within_px} px of one that is drawn."
        )


def thinned(places: Sequence[tuple[float, float]], kept: Collection[int] = (), at_most: int = AT_MOST) -> Thinned:
    """One point of each grid cell, with the finest grid that leaves at most `at_most`; `kept` are always drawn."""
    if len(places) <= at_most:
        return Thinned(tuple(range(len(places))), 0, 0)
    cell_px = FIRST_CELL_PX
    while len(drawn := first_of_cells(places, kept, cell_px)) > at_most + len(kept):
        cell_px *= COARSER
    return Thinned(tuple(sorted(drawn)), len(places) - len(drawn), math.ceil(cell_px * math.sqrt(2)))


def first_of_cells(places: Sequence[tuple[float, float]], kept: Collection[int], cell_px: float) -> set[int]:
    first: dict[tuple[float, float], int] = {}
    for index in [*kept, *range(len(places))]:
        x, y = places[index]
        first.setdefault((x // cell_px, y // cell_px), index)
    return {*first.values(), *kept}


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a mark, and where the mark is."""

    name: str
    x: float
    y: float


def labels(
    wanted: Iterable[Label], marks: Iterable[tuple[float, float]], route: Iterable[tuple[float, float]], bounds: Box
) -> Markup:
    """The labels that fit; earlier ones take precedence."""
    taken = [(x - MARK_PX, y - MARK_PX, x + MARK_PX, y + MARK_PX) for x, y in marks]
    taken += [box_of(*ends) for ends in pairwise(route)]
    parts = []
    for label in wanted:
        width = width_px(cut(label.name, LONGEST_PX))
        free = (
            box for box in around(label, width) if within(box, bounds) and not any(overlap(box, own) for own in taken)
        )
        box = next(free, None)
        if box is not None:
            taken.append(box)
            parts.append(text(box[0], box[3] - 3, label.name, room_px=LONGEST_PX))
    return together(parts)


def box_of(begin: tuple[float, float], end: tuple[float, float]) -> Box:
    return min(begin[0], end[0]), min(begin[1], end[1]), max(begin[0], end[0]), max(begin[1], end[1])


def around(label: Label, width: float) -> Iterator[Box]:
    """Candidate boxes: right, left, above, below, and the four corners."""
    half = SIZE_PX / 2 + 1
    for x in (label.x + AWAY_PX, label.x - AWAY_PX - width):
        yield x, label.y - half, x + width, label.y + half
    for y in (label.y - AWAY_PX - half, label.y + AWAY_PX + half):
        for x in (label.x - width / 2, label.x + MARK_PX, label.x - MARK_PX - width):
            yield x, y - half, x + width, y + half


def within(box: Box, bounds: Box) -> bool:
    return box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
