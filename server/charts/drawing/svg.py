"""SVG elements. All text is escaped, and characters that XML forbids are replaced.

A server has no fonts, so the width of text is estimated. The widths of letters are those of DejaVu Sans, the widest of
the usual sans-serif fonts, rounded up, so that text fits in other fonts too.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final

from markupsafe import Markup, escape

from kitsune.errors import ChartError

WIDE_PX: Final = 720
NARROW_PX: Final = 360
SIZE_PX: Final = 12.0  # of the font
ELLIPSIS: Final = "…"
#: Widths of letters, relative to the font size.
NARROW, WIDE, CAPITAL, OTHER, FULL = 0.4, 0.99, 0.76, 0.64, 1.0
NARROW_LETTERS: Final = frozenset("fijlrtI .,:;'|!()[]/-\N{NO-BREAK SPACE}")
WIDE_LETTERS: Final = frozenset("mwMWQ@%+=<>~\N{MINUS SIGN}\N{MULTIPLICATION SIGN}\N{HORIZONTAL ELLIPSIS}")
#: Control characters, surrogates and two others that XML cannot represent.
FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
REPLACEMENT: Final = "\ufffd"
#: Allowed links: a path of this server, a fragment, a query, or an http(s) address; never `javascript:`.
ADDRESS: Final = re.compile(r"(?:/(?!/)|#|\?|https?://)[^\s\\]*\Z")

Value = str | float | None


def element(name: str, *children: str, **attributes: Value) -> Markup:
    """An element. `text_anchor="end"` becomes text-anchor="end", `class_` becomes class; None omits the attribute."""
    written = [f' {spelled(key)}="{attribute(value)}"' for key, value in attributes.items() if value is not None]
    # Names are constants and the rest is escaped. Markup.format takes three times as long: 37 ms for 36 trials.
    return Markup(f"<{name}{''.join(written)}>{together(children)}</{name}>")  # noqa: S704


@lru_cache(maxsize=256)
def spelled(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def attribute(value: str | float) -> str:
    return escaped(value) if isinstance(value, str) else number(value)


@lru_cache(maxsize=512, typed=True)
def escaped(words: str) -> Markup:
    """Cached: classes repeat, and all texts occur in both widths. `typed`: Markup must not be escaped again."""
    return escape(legal(words))


def number(value: float) -> str:
    """With at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def together(parts: Iterable[str]) -> Markup:
    return Markup("".join([part if isinstance(part, Markup) else escaped(part) for part in parts]))  # noqa: S704


def legal(words: str) -> str:
    return FORBIDDEN.sub(REPLACEMENT, words)


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start", room_px: float | None = None) -> Markup:
    """Text on a base line. If it is wider than `room_px` it is cut, and its tooltip has the whole text."""
    shown = words if room_px is None else cut(words, room_px)
    whole = () if shown == words else (element("title", words),)
    return element(
        "text", *whole, shown, x=x, y=y, class_=css or None, text_anchor=None if anchor == "start" else anchor
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def rect(x: float, y: float, width: float, height: float, css: str) -> Markup:
    return element("rect", x=x, y=y, width=width, height=height, class_=css)


def path(points: Iterable[tuple[float, float]], css: str, *, is_closed: bool = False) -> Markup:
    """A polyline, or a polygon if `is_closed`."""
    route = " L".join(f"{number(x)} {number(y)}" for x, y in points)
    return element("path", d=f"M{route}{'Z' if is_closed else ''}", class_=css)


def steps(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Corners of a step curve: a value holds until the next point."""
    last: float | None = None
    for x, y in points:
        if last is not None:
            yield x, last
        yield x, y
        last = y


def mark(tooltip: str, *shapes: str, href: str = "", css: str | None = None) -> Markup:
    """Shapes with a tooltip, and a link if `href` is not empty. Raises ChartError for a disallowed `href`."""
    if not href:
        return element("g", element("title", tooltip), *shapes, class_=css)
    if not ADDRESS.match(href):
        raise ChartError("a link", f"leads to {href!r}, which is neither a path nor an http address")
    return element("a", element("title", tooltip), *shapes, href=href, aria_label=tooltip, class_=css)


def picture(
    title: str, description: str, width: float, height: float, *children: str, has_links: bool = False
) -> Markup:
    """The <svg> element. Its role is `group` if it has links: the children of an `img` have no roles."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="group" if has_links else "img",
        font_size="12",
        class_="chart-narrow" if width == NARROW_PX else "chart-wide",
    )


def responsive(draw: Callable[[int], Markup]) -> Markup:
    """The drawing in both widths; static/charts.css shows the one that fits, so that text is readable on a phone."""
    return element("div", draw(WIDE_PX), draw(NARROW_PX), class_="chart")


def empty(title: str, message: str) -> Markup:
    """A placeholder for a chart without data."""
    return responsive(
        lambda width: picture(title, message, width, 48, text(width / 2, 28, message, "muted", "middle", width - 8))
    )


def width_px(words: str) -> float:
    return sum(map(letter_width, words)) * SIZE_PX


def letter_width(letter: str) -> float:
    if letter in NARROW_LETTERS:
        return NARROW
    if letter in WIDE_LETTERS:
        return WIDE
    if letter.isupper():
        return CAPITAL
    return OTHER if letter.isascii() or unicodedata.east_asian_width(letter) not in "WF" else FULL


def cut(words: str, room_px: float) -> str:
    """The text, or its beginning and an ellipsis if it is wider than `room_px`."""
    if width_px(words) <= room_px:
        return words
    left = room_px - width_px(ELLIPSIS)
    kept = 0
    while kept < len(words) and (left := left - letter_width(words[kept]) * SIZE_PX) >= 0:
        kept += 1
    return words[:kept].rstrip() + ELLIPSIS
