"""server/charts/drawing/text_width.py: cut text fits, and text that fits is not cut."""

from hypothesis import given
from hypothesis import strategies as st

from server.charts.drawing.text_width import ELLIPSIS, cut, width_px


@given(st.text(), st.floats(20, 500))
def test_what_is_cut_fits(words, room_px):
    shown = cut(words, room_px)
    assert width_px(shown) <= room_px
    assert shown == words or (shown.endswith(ELLIPSIS) and words.startswith(shown[:-1]) and width_px(words) > room_px)


def test_wide_letters_take_more_room_than_narrow_ones():
    assert width_px("iiii") < width_px("aaaa") < width_px("WWWW")
    assert width_px("日本") == 24
    assert cut("precision=bfloat16", 60) == "precisi" + ELLIPSIS
