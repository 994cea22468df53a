"""server/charts/timeline.py: launches are drawn at their times, short ones are merged, lanes show how busy."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.drawing.axes import Scale
from server.charts.timeline import TimeSpan, boxes_of, busy_us, by_stream, timeline
from tests.unit.server.charts.drawings import LABELS, check_chart, description, found, texts, titles, widest

TIMES_US = st.floats(0, 1e6)
SPANS = st.builds(
    lambda stream, ends, name: TimeSpan(stream, min(ends), max(ends), name),
    st.integers(0, 5),
    st.tuples(TIMES_US, TIMES_US),
    LABELS,
)
PLAIN = [TimeSpan(0, 0, 60, "gemm"), TimeSpan(0, 60, 100, "relu"), TimeSpan(1, 20, 70, "gemm")]


@given(st.lists(SPANS, max_size=25))
def test_any_timeline_is_whole(spans):
    check_chart(timeline(spans))


@given(st.lists(SPANS, min_size=1, max_size=60))
def test_no_launch_is_lost(spans):
    scale = Scale(0, 1e6, 0, 50)
    lanes = by_stream(spans)
    boxes = [box for lane in lanes.values() for box in boxes_of(lane, scale)]
    assert sorted(map(hash, spans)) == sorted(hash(span) for box in boxes for span in box.spans)


@given(st.lists(SPANS, min_size=1, max_size=30))
def test_a_stream_is_busy_no_longer_than_it_lasts(spans):
    for lane in by_stream(spans).values():
        busy = busy_us(lane)
        longest = max(span.end_us - span.start_us for span in lane)
        assert longest - 1e-6 <= busy <= sum(span.end_us - span.start_us for span in lane) + 1e-6
        assert busy <= max(span.end_us for span in lane) - lane[0].start_us + 1e-6


def test_launches_lie_where_they_run():
    root = widest(timeline(PLAIN))
    lanes = found(root, "rect", "lane")
    left, whole = float(lanes[0].get("x")), float(lanes[0].get("width"))
    boxes = found(root, "rect", "series-1")[:2] + found(root, "rect", "series-2")[:1]
    shares = [((float(b.get("x")) - left) / whole, float(b.get("width")) / whole) for b in boxes]
    assert shares == [pytest.approx(each, abs=1e-3) for each in ((0, 0.6), (0.2, 0.5), (0.6, 0.4))]
    assert boxes[0].get("y") == boxes[2].get("y") != boxes[1].get("y")


def test_lanes_tell_how_busy_they_are():
    root = widest(timeline(PLAIN))
    assert {"stream 0, 100\N{NO-BREAK SPACE}% busy", "stream 1, 50\N{NO-BREAK SPACE}% busy"} <= set(texts(root))
    assert "stream 1: 1\N{NO-BREAK SPACE}launch, busy for 50.0 of 100.0 µs." in description(root)
    assert "Most of the time goes into gemm 73\N{NO-BREAK SPACE}%" in description(root)


def test_names_stand_in_boxes_and_letters_where_names_have_no_room():
    assert texts(widest(timeline(PLAIN))).count("gemm") == 2
    long = [TimeSpan(0, 0, 95, "triton_" * 20), TimeSpan(0, 95, 100, "triton_" * 10)]
    assert texts(widest(timeline(long))).count("A") == 2  # in the box, and in the legend


def test_what_is_too_short_is_joined_and_that_is_said():
    rnd = random.Random(1)
    tiny = [TimeSpan(0, n * 0.1, n * 0.1 + 0.05, rnd.choice("ab")) for n in range(4999)]
    chart = timeline([*tiny, TimeSpan(0, 500.0, 9000.0, "long")])
    check_chart(chart)
    root = widest(chart)
    assert len(found(root, "rect")) < 20
    assert any("4,999\N{NO-BREAK SPACE}launches on stream 0: 0.0 to 499.9 µs; " in title for title in titles(root))
    assert "5,000 launches in 2 boxes: neighbours too short to be seen are drawn as one." in " ".join(texts(root))
    assert "5,000 launches in 2 boxes" in description(root)


@pytest.mark.parametrize("spans", [[], PLAIN[:1], [TimeSpan(0, 5.0, 5.0, "x")] * 3])
def test_few_and_momentary_launches_are_drawn(spans):
    check_chart(timeline(spans))


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (TimeSpan(0, math.nan, 1.0, "gemm"), "the beginning of 'gemm' is nan"),
        (TimeSpan(0, 0.0, math.inf, "gemm"), "the end of 'gemm' is inf"),
        (TimeSpan(0, 2.0, 1.0, "gemm"), "'gemm' ends at 1 µs, before it begins"),
    ],
)
def test_what_has_no_place_is_refused(span, message):
    with pytest.raises(ChartError, match=message):
        timeline([span])
