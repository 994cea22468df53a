"""Layout of charts: a legend and a note below the plot, and rows with labels.

The labels of a row are beside it on wide drawings, above it on narrow ones.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from markupsafe import Markup

from server.charts.drawing.svg import WIDE_PX, picture, text, together, width_px

BELOW_PX: Final = 42.0  # below a plot, for tick labels and title
SYMBOL_PX: Final = 22.0
BETWEEN_PX: Final = 14.0
LINE_PX: Final = 20.0

BAND_PX: Final = 20.0  # height of the drawn part of a row
NOTE_PX: Final = 16.0
ABOVE_PX: Final = 18.0  # height of the labels above a row
GAP_PX: Final = 12.0
LABEL_ROOM_PX: Final = 178.0
FIGURE_ROOM_PX: Final = 164.0
NARROW_FIGURE_ROOM_PX: Final = 150.0
EDGE_PX: Final = 6.0

#: A function that draws a symbol around a point, and its meaning.
Entry = tuple[Callable[[float, float], Markup], str]


def drawing(
    title: str,
    description: str,
    width: float,
    bottom: float,
    *children: str,
    entries: Iterable[Entry] = (),
    note: str = "",
    has_links: bool = False,
) -> Markup:
    """The <svg> element of a plot, with its legend and a note. `bottom`: of the plot, above its tick labels."""
    symbols, below = legend(entries, bottom + BELOW_PX, width)
    lines, height = remark(note, below, width)
    return picture(title, description, width, height, *children, symbols, lines, has_links=has_links)


def legend(entries: Iterable[Entry], top: float, width: float) -> tuple[Markup, float]:
    """The drawing, and the y at which it ends."""
    parts, left, base = [], 0.0, top + LINE_PX - 6
    for symbol, words in entries:
        needed = SYMBOL_PX + width_px(words)
        if left and left + needed > width:
            left, base = 0.0, base + LINE_PX
        parts += [
            symbol(left + SYMBOL_PX / 2 - 3, base - 4),
            text(left + SYMBOL_PX, base, words, room_px=width - SYMBOL_PX),
        ]
        left += needed + BETWEEN_PX
    return together(parts), base + 6 if parts else top


def remark(words: str, top: float, width: float) -> tuple[Markup, float]:
    """A note in small letters, broken into lines, and the y at which it ends; empty for empty `words`."""
    parts, base, held = [], top + LINE_PX - 6, ""
    for word in words.split():
        longer = f"{held} {word}".strip()
        if held and width_px(longer) > width:
            parts.append(text(0, base, held, "muted", room_px=width))
            base, longer = base + LINE_PX - 4, word
        held = longer
    if not held:
        return Markup(""), top
    return together([*parts, text(0, base, held, "muted", room_px=width)]), base + 6


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
            room_px = LABEL_ROOM_PX
            right = text(self.width - FIGURE_ROOM_PX, base, figure, "figure", room_px=FIGURE_ROOM_PX)
        else:
            room_px = self.width - NARROW_FIGURE_ROOM_PX - EDGE_PX
            right = text(self.width, base, figure, "figure", "end", NARROW_FIGURE_ROOM_PX)
        small = text(0, below, note, "muted", room_px=self.width) if note else ""
        return together((text(0, base, label, room_px=room_px), right, small))


def rows_of(width: float, notes: Sequence[str]) -> Rows:
    """One row for each note; the note may be empty."""
    plain = GAP_PX + BAND_PX + (0 if width >= WIDE_PX else ABOVE_PX)
    return Rows(width, tuple(accumulate((plain + NOTE_PX * bool(note) for note in notes), initial=0.0)))
