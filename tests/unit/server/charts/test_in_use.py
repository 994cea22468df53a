"""server/charts/in_use.py: the curve shows the memory in use, keeps its peak, and is aligned with the timeline."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.in_use import Used, amount, in_use
from server.charts.timeline import TimeSpan, timeline
from tests.unit.server.charts.drawings import check_chart, description, drawings, edges, found, texts, widest

MIB = 2**20
PLAIN = [Used(0.0, MIB), Used(20.0, 4 * MIB), Used(60.0, 2 * MIB), Used(100.0, 2 * MIB)]
MOMENTS = st.lists(st.builds(Used, st.floats(0, 1e9), st.integers(0, 2**45)), max_size=60).map(
    lambda moments: sorted(moments, key=lambda each: each.at_us)
)


def outline(chart) -> list[tuple[float, float]]:
    (curve,) = found(widest(chart), "path", "used")
    return list(edges(curve))


@given(MOMENTS)
def test_any_curve_is_whole(moments):
    check_chart(in_use(moments))


@given(MOMENTS.filter(bool))
def test_the_peak_is_drawn_and_told(moments):
    places = outline(in_use(moments))
    peak = max(each.used_bytes for each in moments)
    assert amount(peak) in description(widest(in_use(moments)))
    if peak:
        assert min(y for _, y in places) == pytest.approx(26.0, abs=0.01)


def test_the_curve_is_made_of_steps_that_lie_where_the_memory_is_in_use():
    places = outline(in_use(PLAIN))
    left, whole = places[0][0], places[-1][0] - places[0][0]
    shares = [((x - left) / whole, (136.0 - y) / 110.0) for x, y in places]
    expected = [(0, 0), (0, 0.25), (0.2, 0.25), (0.2, 1), (0.6, 1), (0.6, 0.5), (1, 0.5), (1, 0.5), (1, 0)]
    assert shares == [pytest.approx(each, abs=2e-3) for each in expected]
    assert "At most 4.0 MiB are in use, from 20.0 µs on." in texts(widest(in_use(PLAIN)))


def test_time_goes_from_where_to_where_it_goes_above():
    """In both widths, the same x is the same time in both drawings."""
    lanes = drawings(timeline([TimeSpan(0, 0.0, 60.0, "a"), TimeSpan(1, 20.0, 100.0, "b")]))
    curves = drawings(in_use(PLAIN))
    for above, below in zip(lanes, curves, strict=True):
        lane = found(above, "rect", "lane")[0]
        xs = [x for x, _ in edges(found(below, "path", "used")[0])]
        begin, width = float(lane.get("x")), float(lane.get("width"))
        assert [min(xs), max(xs)] == [pytest.approx(begin, abs=0.01), pytest.approx(begin + width, abs=0.01)]


def test_of_ten_thousand_moments_no_more_is_drawn_than_can_be_seen():
    chart = in_use([Used(float(at), MIB + at % 7 + (MIB if at == 4321 else 0)) for at in range(10_000)])
    places = outline(chart)
    assert len(places) < 2 * 720
    assert min(y for _, y in places) == pytest.approx(26.0, abs=0.01)
    assert len(chart) < 60_000


@pytest.mark.parametrize("moments", [[], PLAIN[:1], [Used(5.0, 0)] * 3])
def test_few_moments_and_none_are_drawn(moments):
    check_chart(in_use(moments))


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ([Used(math.nan, 1)], "a moment of the step is nan"),
        ([Used(0.0, 2**60)], "the memory in use is "),
        ([Used(2.0, 1), Used(1.0, 1)], "goes back in time from 2 to 1 µs"),
    ],
)
def test_what_has_no_place_is_refused(moments, message):
    with pytest.raises(ChartError, match=message):
        in_use(moments)


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (3 * MIB, "3.0 MiB"), (2**31, "2.0 GiB")],
)
def test_amounts_are_told_in_a_fitting_unit(size, told):
    assert amount(size).replace("\N{NO-BREAK SPACE}", " ") == told
