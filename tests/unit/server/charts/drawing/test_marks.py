"""drawing/marks.py: few marks remain, the important ones among them, and the note about the others is true."""

from math import dist

from hypothesis import given
from hypothesis import strategies as st

from server.charts.drawing.marks import thinned

PLACES = st.lists(st.tuples(st.floats(0, 720), st.floats(0, 300)), min_size=1, max_size=120)


@given(PLACES, st.integers(1, 40), st.data())
def test_what_is_left_out_lies_near_what_is_drawn(places, at_most, data):
    kept = data.draw(st.sets(st.integers(0, len(places) - 1), max_size=5))
    few = thinned(places, kept, at_most)
    assert kept <= set(few.drawn)
    assert len(few.drawn) + few.left_out == len(places)
    assert few.left_out == 0 or len(few.drawn) <= at_most + len(kept)
    assert all(min(dist(place, places[index]) for index in few.drawn) <= few.within_px for place in places)


def test_few_places_are_all_drawn():
    few = thinned([(1.0, 1.0)] * 3)
    assert few.drawn == (0, 1, 2)
    assert few.note("trials") == ""


def test_what_is_left_out_is_told():
    few = thinned([(0.0, 0.0)] * 5000 + [(100.0, 100.0)])
    assert few.drawn == (0, 5000)
    assert (
        few.note("trials") == "Drawn are 2 of 5,001 trials: each of the others lies within 3 px of one that is drawn."
    )
