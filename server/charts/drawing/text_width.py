"""Words in, how wide they are drawn out, and what is left of them where there is less room.

A server has no fonts. The widths are those of DejaVu Sans, the widest of the usual sans-serif fonts, rounded up: words
fit in the others too.
"""

import unicodedata
from typing import Final

SIZE_PX: Final = 12.0
ELLIPSIS: Final = "…"
#: Width in shares of the size.
NARROW, WIDE, CAPITAL, OTHER, FULL = 0.4, 0.99, 0.76, 0.64, 1.0
NARROW_LETTERS: Final = frozenset("fijlrtI .,:;'|!()[]/-\N{NO-BREAK SPACE}")
WIDE_LETTERS: Final = frozenset("mwMWQ@%+=<>~\N{MINUS SIGN}\N{MULTIPLICATION SIGN}\N{HORIZONTAL ELLIPSIS}")


def width_px(words: str, size_px: float = SIZE_PX) -> float:
    return sum(map(letter_width, words)) * size_px


def letter_width(letter: str) -> float:
    if letter in NARROW_LETTERS:
        return NARROW
    if letter in WIDE_LETTERS:
        return WIDE
    if letter.isupper():
        return CAPITAL
    return OTHER if letter.isascii() or unicodedata.east_asian_width(letter) not in "WF" else FULL


def cut(words: str, room_px: float, size_px: float = SIZE_PX) -> str:
    """The words, or as many letters of them as have room beside an ellipsis."""
    if width_px(words, size_px) <= room_px:
        return words
    left = room_px - width_px(ELLIPSIS, size_px)
    kept = 0
    while kept < len(words) and (left := left - letter_width(words[kept]) * size_px) >= 0:
        kept += 1
    return words[:kept].rstrip() + ELLIPSIS
