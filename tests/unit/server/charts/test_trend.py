"""server/charts/trend.py: runs are in order of time, and ticks are at full days."""

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.drawing.axes import date_ticks, in_utc
from server.charts.trend import TrendPoint, trend
from tests.unit.server.charts.drawings import LABELS, check_chart, check_told, found, texts, titles, widest

TIMES = "\N{MULTIPLICATION SIGN}"
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=-9))])
TIMES_OF_RUNS = st.datetimes(datetime(1990, 1, 1), datetime(2190, 1, 1), timezones=st.just(UTC) | ZONES)
MOMENTS = st.builds(
    TrendPoint,
    TIMES_OF_RUNS,
    st.floats(0.01, 1e4),
    st.none() | st.floats(0.01, 1e4),
    st.none() | st.floats(0.01, 1e4),
    LABELS,
    st.sampled_from(["", "/runs/1"]),
)


def moments(*hours: float) -> list[TrendPoint]:
    return [
        TrendPoint(NOON + timedelta(hours=each), 1 + n / 10, 1.0, 1 + n / 5, f"run {n}", f"/runs/{n}")
        for n, each in enumerate(hours)
    ]


@given(st.lists(MOMENTS, max_size=12))
def test_any_trend_is_whole(each):
    chart = trend(each)
    check_chart(chart)
    for moment in each:
        check_told(chart, moment.label)


@given(TIMES_OF_RUNS, st.integers(60, 100 * 365 * 86_400), st.integers(2, 10))
def test_ticks_are_round_moments_between_the_ends(begin, lasts_s, count):
    low = in_utc(begin).timestamp()
    ticks = date_ticks(low, low + lasts_s, count)
    moments_ = [datetime.fromtimestamp(value, UTC) for value, _ in ticks]
    assert len(ticks) <= math.sqrt(5) * count + 1, "from one step to the next it is at most five times as long"
    assert all(low <= value <= low + lasts_s for value, _ in ticks)
    assert all(moment.second == 0 for moment in moments_)
    assert len({words for _, words in ticks}) == len(ticks) or lasts_s > 86_400


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        (3, ["12:00", "13:00", "14:00", "15:00"]),
        (24, ["12:00", "18:00", "23 Nov", "06:00", "12:00"]),
        (24 * 9, ["23 Nov", "25 Nov", "27 Nov", "29 Nov", "01 Dec"]),
        (24 * 300, ["Jan 2027", "Apr 2027", "Jul 2027"]),
        (24 * 365 * 5, ["2027", "2028", "2029", "2030", "2031"]),
    ],
)
def test_ticks_are_told_as_hours_days_months_or_years(hours, words):
    low = NOON.timestamp()
    assert [told for _, told in date_ticks(low, low + hours * 3600, 4)] == words


def test_runs_lie_in_the_order_of_time_whatever_the_order_given():
    there, back = (trend(each) for each in (moments(0, 30, 70), moments(0, 30, 70)[::-1]))
    assert there == back
    across = [float(each.get("cx")) for each in found(widest(there), "circle")][:3]
    assert across == sorted(across)
    assert (across[2] - across[1]) / (across[1] - across[0]) == pytest.approx(40 / 30, rel=1e-3)


def test_a_run_leads_to_its_page_and_is_told():
    root = widest(trend(moments(0, 30)))
    assert [link.get("href") for link in found(root, "a")] == ["/runs/0", "/runs/1"]
    assert any(title.startswith("run 1, 2026-11-23 18:00:00") and f"1.10{TIMES}" in title for title in titles(root))
    assert "end of the run, UTC, 2026" in texts(root)


@pytest.mark.parametrize("each", [[], moments(0), moments(0, 0, 0)])
def test_few_and_simultaneous_runs_are_drawn(each):
    check_chart(trend(each))


def test_one_run_is_shown_on_its_day():
    assert "22 Nov" in texts(widest(trend(moments(0)))) or "12:00" in texts(widest(trend(moments(0))))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_place_is_refused(value):
    with pytest.raises(ChartError, match="the speedup of 'a'"):
        trend([TrendPoint(NOON, value, None, None, "a", "")])
