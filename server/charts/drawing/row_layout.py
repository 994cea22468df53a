"""Layout of charts with rows: labels are beside a row on wide drawings, above it on narrow ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from markupsafe import Markup

from server.charts.drawing.svg import WIDE_PX, text, together

BAND_PX: Final = 20.0  # height of the drawn part of a row
NOTE_PX: Final = 16.0
ABOVE_PX: Final = 18.0  # height of the labels above a row
GAP_PX: Final = 12.0
LABEL_ROOM_PX: Final = 178.0
FIGURE_ROOM_PX: Final = 164.0
NARROW_FIGURE_ROOM_PX: Final = 150.0
EDGE_PX: Final = 6.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a chart. `tops` has one more entry than there are rows: the end of the last one."""

    width: float
    tops: tuple[float, ...]

    @property
    def is_wide(self) -> bool:
        return self.width >= WIDE_PX

    @property
    def left(self) -> float:
        """The left edge of the plot."""
        return LABEL_ROOM_PX + EDGE_PX * 2 if self.is_wide else EDGE_PX

    @property
    def right(self) -> float:
        return self.width - (FIGURE_ROOM_PX + EDGE_PX * 2 if self.is_wide else EDGE_PX)

    @property
    def bottom(self) -> float:
        return self.tops[-1]

    def band(self, row: int) -> float:
        """The upper edge of the drawn part of a row."""
        return self.tops[row] + GAP_PX / 2 + (0 if self.is_wide else ABOVE_PX)

    def words(self, row: int, label: str, figure: str, note: str = "") -> Markup:
        """The texts of a row: label, figure and note."""
        base = self.band(row) + BAND_PX / 2 + 4 if self.is_wide else self.band(row) - 6
        below = self.band(row) + BAND_PX + NOTE_PX - 3
        if self.is_wide:
            beside = (text(0, base, label, room_px=LABEL_ROOM_PX), self.figure(base, figure))
        else:
            room_px = self.width - NARROW_FIGURE_ROOM_PX - EDGE_PX
            right = text(self.width, base, figure, "figure", "end", NARROW_FIGURE_ROOM_PX)
            beside = (text(0, base, label, room_px=room_px), right)
        return together([*beside, *([text(0, below, note, "muted", room_px=self.width)] if note else [])])

    def figure(self, base: float, figure: str) -> Markup:
        return text(self.width - FIGURE_ROOM_PX, base, figure, "figure", room_px=FIGURE_ROOM_PX)


def rows_of(width: float, notes: Sequence[str]) -> Rows:
    """One row for each note; the note may be empty."""
    plain = GAP_PX + BAND_PX + (0 if width >= WIDE_PX else ABOVE_PX)
    return Rows(width, tuple(accumulate((plain + NOTE_PX * bool(note) for note in notes), initial=0.0)))
