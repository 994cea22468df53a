"""Helpers for tests of charts: parsing, invariants of all charts, and hostile texts."""

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from hypothesis import strategies as st
from markupsafe import Markup

from server.charts.drawing.svg import NARROW_PX, WIDE_PX, legal, width_px

NAMESPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = ["<script>alert(1)</script>", '" onload="alert(1)', "]]>", "&amp;", "\x00\x1b[2J", "\ud800", "a" * 500, ""]
#: Any Unicode, including single surrogates and control characters.
LABELS = st.sampled_from(HOSTILE) | st.text(st.characters(), max_size=30)
TAKEN_MS = st.floats(1e-6, 1e6)
#: Tolerance for the width of lines.
SLACK_PX = 1.0


def drawings(chart: Markup) -> tuple[ET.Element, ET.Element]:
    """The wide and the narrow drawing. Fails if the text is not XML."""
    root = ET.fromstring(str(chart))
    assert (root.tag, root.get("class")) == ("div", "chart")
    wide, narrow = root
    return wide, narrow


def widest(chart: Markup) -> ET.Element:
    return drawings(chart)[0]


def found(root: ET.Element, name: str, css: str | None = None) -> list[ET.Element]:
    elements = root.iter(f"{NAMESPACE}{name}")
    return [each for each in elements if css is None or css in (each.get("class") or "").split()]


def words_of(element: ET.Element) -> str:
    """The visible text of an element, without its title."""
    title = element.find(f"{NAMESPACE}title")
    return (element.text or "") if title is None else (title.tail or "")


def texts(root: ET.Element) -> list[str]:
    return [words_of(element) for element in found(root, "text")]


def titles(root: ET.Element) -> list[str]:
    """The tooltips."""
    return [element.text or "" for element in found(root, "title")]


def description(root: ET.Element) -> str:
    return root.findtext(f"{NAMESPACE}desc") or ""


def edges(element: ET.Element) -> Iterator[tuple[float, float]]:
    """The corners of an element's shape."""

    def number(name: str) -> float:
        return float(element.get(name) or 0.0)

    match element.tag.removeprefix(NAMESPACE):
        case "rect":
            yield number("x"), number("y")
            yield number("x") + number("width"), number("y") + number("height")
        case "line":
            yield number("x1"), number("y1")
            yield number("x2"), number("y2")
        case "circle":
            yield number("cx") - number("r"), number("cy") - number("r")
            yield number("cx") + number("r"), number("cy") + number("r")
        case "path":
            numbers = [float(each) for each in re.findall(r"-?[\d.]+(?:e[-+]?\d+)?", element.get("d") or "")]
            yield from zip(numbers[::2], numbers[1::2], strict=True)
        case "text":
            width, x = width_px(words_of(element)), number("x")
            left = {"middle": x - width / 2, "end": x - width}.get(element.get("text-anchor") or "", x)
            yield left, number("y") - 9
            yield left + width, number("y") + 3


def check_chart(chart: Markup) -> None:
    """The invariants of all charts, for any data."""
    assert "<script" not in chart
    wide, narrow = drawings(chart)
    for root, width in ((wide, WIDE_PX), (narrow, NARROW_PX)):
        box = [float(each) for each in (root.get("viewBox") or "").split()]
        assert box[:3] == [0, 0, width]
        check_inside(root, box[2], box[3])
        assert titles(root)[0] and description(root)
        assert root.get("role") == ("group" if found(root, "a") else "img")
        assert root.get("font-size") == "12"
        for element in root.iter():
            assert "style" not in element.attrib
            assert not any(name.startswith("on") for name in element.attrib)


def check_inside(root: ET.Element, width: float, height: float) -> None:
    for element in root.iter():
        for x, y in edges(element):
            assert -SLACK_PX <= x <= width + SLACK_PX, ET.tostring(element)
            assert -SLACK_PX <= y <= height + SLACK_PX, ET.tostring(element)


def check_told(chart: Markup, label: str) -> None:
    """The label is complete in a tooltip and in the description for screen readers."""
    wanted = legal(label).replace("\r\n", "\n").replace("\r", "\n")
    for root in drawings(chart):
        assert any(wanted in title for title in titles(root)[1:])
        assert wanted in description(root)
