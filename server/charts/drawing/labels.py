"""Places labels beside marks so that they cover no mark, line or other label; labels that do not fit are left out.

The name of a mark without a label is still shown as its tooltip.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from server.charts.drawing.svg import text, together
from server.charts.drawing.text_width import SIZE_PX, cut, width_px

AWAY_PX: Final = 10.0
MARK_PX: Final = 5.0
LONGEST_PX: Final = 150.0

Box = tuple[float, float, float, float]  # left, top, right, bottom


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
