"""Legends and notes below charts, broken into lines."""

from collections.abc import Callable, Iterable
from typing import Final

from markupsafe import Markup

from server.charts.drawing.svg import text, together
from server.charts.drawing.text_width import width_px

SYMBOL_PX: Final = 22.0
BETWEEN_PX: Final = 14.0
LINE_PX: Final = 20.0

#: A function that draws a symbol around a point, and its meaning.
Entry = tuple[Callable[[float, float], Markup], str]


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
