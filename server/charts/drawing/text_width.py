"""Estimates the width of text, and cuts text to a width.

A server has no fonts. The widths are those of DejaVu Sans, the widest of the usual sans-serif fonts, rounded up, so
that text fits in other fonts too.
"""

import unicodedata
from typing import Final

SIZE_PX: Final = 12.0
ELLIPSIS: Final = "…"
#: Widths of letters, relative to the font size.
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
    """The text, or its beginning and an ellipsis if it is wider than `room_px`."""
    if width_px(words, size_px) <= room_px:
        return words
    left = room_px - width_px(ELLIPSIS, size_px)
    kept = 0
    while kept < len(words) and (left := left - letter_width(words[kept]) * size_px) >= 0:
        kept += 1
    return words[:kept].rstrip() + ELLIPSIS
