"""server/charts/waterfall.py: bars are contiguous and sum to the total, whiskers show the interval."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.waterfall import Bar, placed, waterfall
from tests.unit.server.charts.drawings import (
    LABELS,
    TAKEN_MS,
    check_chart,
    check_told,
    description,
    found,
    texts,
    titles,
    widest,
)

NBSP, MINUS = "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}"
BARS = [
    Bar("as given", 10.0, 9.8, 10.2, "total"),
    Bar("amp", -5.0, -5.5, -4.6, "step", "precision=bfloat16"),
    Bar("pool", 1.0, 0.5, 1.5, "step"),
    Bar("together", -2.0, None, None, "remainder"),
    Bar("plan", 4.0, 3.9, 4.1, "total"),
]


@st.composite
def waterfalls(draw):
    """Two totals with steps of any size between them, and the remainder."""
    first, last = draw(TAKEN_MS), draw(TAKEN_MS)
    around = st.one_of(st.none(), st.floats(0, 10))
    steps = draw(st.lists(st.tuples(LABELS, st.floats(-1e6, 1e6), around, LABELS), max_size=8))
    bars = [
        Bar(label, ms, None if about is None else ms - about, None if about is None else ms + about, "step", note)
        for label, ms, about, note in steps
    ]
    rest = last - first - math.fsum(bar.ms for bar in bars)
    remainder = Bar("remainder", rest, None, None, "remainder")
    return [Bar("as given", first, first, first, "total"), *bars, remainder, Bar("plan", last, None, None, "total")]


def closes(bars):
    """Whether the rounding error is small, relative to the first total."""
    at_ms = math.fsum(bar.ms for bar in bars[:-1])
    return abs(at_ms - bars[-1].ms) <= 1e-4 * max(bars[0].ms, bars[-1].ms)


@given(waterfalls().filter(closes))
def test_bars_meet_end_to_end_and_sum_to_the_total(bars):
    places = list(placed(bars))
    assert places[0].begin_ms == places[-1].begin_ms == 0
    for before, after in pairwise(places[:-1]):
        assert after.begin_ms == before.end_ms
        assert after.end_ms - after.begin_ms == pytest.approx(after.bar.ms, abs=1e-6)
    assert places[-2].end_ms == pytest.approx(places[-1].end_ms, abs=1e-3 * max(bars[0].ms, bars[-1].ms))


@given(waterfalls().filter(closes))
def test_any_waterfall_is_whole(bars):
    chart = waterfall(bars)
    check_chart(chart)
    for bar in bars:
        check_told(chart, bar.label)


def rects(root):
    """The left and right edges of all bars, without the legend."""
    every = [(float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in found(root, "rect")]
    return every[: len(BARS)]


def test_bars_meet_in_the_drawing_too():
    given_, amp, pool, together, plan = rects(widest(waterfall(BARS)))
    per_ms = (given_[1] - given_[0]) / 10
    assert amp == pytest.approx((given_[1] - 5 * per_ms, given_[1]), abs=0.02)
    assert pool == pytest.approx((amp[0], amp[0] + per_ms), abs=0.02)
    assert together == pytest.approx((pool[1] - 2 * per_ms, pool[1]), abs=0.02)
    assert plan == pytest.approx((given_[0], together[0]), abs=0.02)


def test_whiskers_stand_around_the_end_of_a_bar():
    root = widest(waterfall(BARS))
    given_, amp, *_ = rects(root)
    per_ms = (given_[1] - given_[0]) / 10
    whiskers = [each.get("d").split() for each in found(root, "path", "whisker")]
    assert len(whiskers) == 4 + 1  # the remainder has none, the legend has one
    low, high = (float(whiskers[1][index].lstrip("ML")) for index in (0, 2))
    assert (low, high) == pytest.approx((amp[0] - 0.5 * per_ms, amp[0] + 0.4 * per_ms), abs=0.02)


def test_ms_and_shares_are_told():
    shown = texts(widest(waterfall(BARS)))
    assert shown[-5:] == ["time of a step", "saves time", "costs time", "what the changes do together", "95 % interval"]
    for words in (
        f"10.00{NBSP}ms",
        f"{MINUS}5.000{NBSP}ms ({MINUS}50{NBSP}%)",
        f"+1.000{NBSP}ms (+10{NBSP}%)",
        f"4.000{NBSP}ms ({MINUS}60{NBSP}%)",
        "precision=bfloat16",
    ):
        assert words in shown


def test_the_same_is_told_in_words():
    told = f"amp: {MINUS}5.000{NBSP}ms ({MINUS}50{NBSP}%); 95 % interval {MINUS}5.500{NBSP}ms to {MINUS}4.600{NBSP}ms"
    root = widest(waterfall(BARS))
    assert f"{told}; precision=bfloat16." in description(root)
    assert f"{told}; precision=bfloat16" in titles(root)


def test_what_saves_and_what_costs_differ_in_more_than_colour():
    root = widest(waterfall(BARS))
    assert [each.get("class") for each in found(root, "rect")][:5] == ["total", "saved", "cost", "remainder", "total"]


def test_one_total_and_nothing_at_all_are_drawn():
    check_chart(waterfall(BARS[:1]))
    check_chart(waterfall([]))
    assert texts(widest(waterfall([]))) == ["Nothing was measured yet."]


@pytest.mark.parametrize(
    ("bars", "message"),
    [
        ([BARS[1]], "'amp' is the first or the last one, which must be totals"),
        ([BARS[0], BARS[1]], "'amp' is the first or the last one"),
        (
            [BARS[0], BARS[1], BARS[4]],
            "'plan' is 4 ms, but the bars before it lead to 5 ms; add a bar for the remainder",
        ),
        ([Bar("as given", math.nan, None, None, "total")], "'as given' is nan"),
        ([Bar("as given", 1.0, 0.9, math.inf, "total")], "'as given' is inf"),
        ([Bar("as given", 0.0, None, None, "total")], "a step takes some time"),
    ],
)
def test_what_does_not_add_up_is_refused(bars, message):
    with pytest.raises(ChartError, match=message):
        waterfall(bars)
