"""server/charts/drawing/svg.py: everything is escaped, the XML is valid, links are safe, and cut text fits."""

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.drawing.svg import ELLIPSIS, cut, element, empty, legal, mark, number, rect, text, width_px
from tests.unit.server.charts.drawings import check_chart, texts, widest


@given(st.text(st.characters()))
def test_whatever_is_written_is_read_again(words):
    parsed = ET.fromstring(str(element("g", words, class_=words)))
    assert (parsed.text or "").replace("\r", "\n") == legal(words).replace("\r\n", "\n").replace("\r", "\n")
    assert set(parsed.attrib) == {"class"}


def test_attributes_are_named_as_svg_names_them():
    assert element("text", text_anchor="end", class_="muted", viewBox="0 0 1 1", x=1.50, y=None) == (
        '<text text-anchor="end" class="muted" viewBox="0 0 1 1" x="1.5"></text>'
    )


def test_numbers_are_short():
    assert [number(value) for value in (1, 1.0, 0.126, 100.0, -3.5)] == ["1", "1", "0.13", "100", "-3.5"]


def test_what_is_cut_is_told_whole():
    assert text(0, 0, "short", room_px=100) == '<text x="0" y="0">short</text>'
    assert "<title>precision=bfloat16 &amp; more</title>precis" in text(0, 0, "precision=bfloat16 & more", room_px=60)


@pytest.mark.parametrize("href", ["/runs/06g", "#trial-3", "?ids=1,2", "https://example.org/runs/1", "http://a/b"])
def test_a_mark_leads_to_an_address(href):
    link = ET.fromstring(str(mark("what it is", rect(0, 0, 1, 1, "total"), href=href)))
    assert (link.tag, link.get("href"), link.get("aria-label")) == ("a", href, "what it is")


@pytest.mark.parametrize(
    "href",
    ["javascript:alert(1)", "data:text/html,x", "//elsewhere.org", " /runs", "java\nscript:x", "/a b", "/\\elsewhere"],
)
def test_a_mark_leads_nowhere_else(href):
    with pytest.raises(ChartError, match="neither a path nor an http address"):
        mark("what it is", href=href)


def test_where_nothing_is_to_be_drawn_it_says_so():
    chart = empty("A chart", "Nothing yet.")
    check_chart(chart)
    assert texts(widest(chart)) == ["Nothing yet."]


@given(st.text(), st.floats(20, 500))
def test_what_is_cut_fits(words, room_px):
    shown = cut(words, room_px)
    assert width_px(shown) <= room_px
    assert shown == words or (shown.endswith(ELLIPSIS) and words.startswith(shown[:-1]) and width_px(words) > room_px)


def test_wide_letters_take_more_room_than_narrow_ones():
    assert width_px("iiii") < width_px("aaaa") < width_px("WWWW")
    assert width_px("日本") == 24
    assert cut("precision=bfloat16", 60) == "precisi" + ELLIPSIS
