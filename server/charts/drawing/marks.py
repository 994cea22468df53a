"""Marks for measurements, and whiskers for their intervals.

Series differ in shape as well as in colour, so that the charts do not depend on colour.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from markupsafe import Markup

from server.charts.drawing.svg import element, line, path, together

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


def whisker_along_x(low_px: float | None, high_px: float | None, y: float) -> Markup:
    """An error bar with caps, on a light outline that sets it off from bars; empty if the interval is unknown."""
    return whisker(low_px, high_px, lambda along, across: (along, y + across))


def whisker_along_y(low_px: float | None, high_px: float | None, x: float) -> Markup:
    return whisker(low_px, high_px, lambda along, across: (x + across, along))


def whisker(
    low_px: float | None, high_px: float | None, place: Callable[[float, float], tuple[float, float]]
) -> Markup:
    if low_px is None or high_px is None:
        return Markup("")
    strokes = [
        (low_px, 0.0, high_px, 0.0),
        *((end, -CAP_PX, end, CAP_PX) for end in (low_px, high_px)),
    ]
    route = " ".join(
        "M{:.2f} {:.2f} L{:.2f} {:.2f}".format(*place(x1, y1), *place(x2, y2)) for x1, y1, x2, y2 in strokes
    )
    return together(element("path", d=route, class_=css) for css in ("halo", "whisker"))
