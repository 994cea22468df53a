"""drawing/words.py: numbers and times on pages and charts; neighbouring tick labels differ, changes have a sign."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Interval
from server.charts.drawing import words
from server.charts.drawing.axes import LARGEST, linear

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def plain(text: str) -> str:
    return (
        text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-").replace("\N{MULTIPLICATION SIGN}", "x")
    )


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-5, "just now"),
        (0.4, "just now"),
        (1, "1 s ago"),
        (89.9, "89 s ago"),
        (90, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (47 * 3600, "47 h ago"),
        (48 * 3600, "2 days ago"),
        (59 * 86400, "59 days ago"),
        (60 * 86400, "2026-09-23"),
    ],
)
def test_ago(seconds, told):
    assert plain(words.ago(NOW - timedelta(seconds=seconds), NOW)) == told


@given(st.floats(min_value=0, max_value=5e6))
def test_ago_never_says_one_of_many(seconds):
    assert not plain(words.ago(NOW - timedelta(seconds=seconds), NOW)).startswith("1 days")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0.0 s"), (9.31, "9.3 s"), (250, "4 min 10 s"), (240, "4 min"), (7500, "2 h 5 min")]
)
def test_lasted(seconds, told):
    assert plain(words.lasted(seconds)) == told


def test_a_moment_is_told_in_utc():
    at = datetime(2026, 11, 22, 14, 3, 4, tzinfo=timezone(timedelta(hours=2)))
    assert plain(words.moment(at)) == "2026-11-22 12:03:04 UTC"


def test_gain_and_its_interval():
    interval = Interval(median=1.416, low=1.3849, high=1.46)
    assert plain(words.gain(interval)) == plain(words.gain(1.416)) == "1.42x"
    assert plain(words.gain(12.34)) == "12.3x"
    assert words.spread(interval) == "1.38 to 1.46"
    assert words.spread(Interval(median=1, low=1, high=1)) == "is the baseline"
    assert words.spread(Interval(median=1, low=1, high=1.004)) == "1.00 to 1.00"


@pytest.mark.parametrize(
    ("share", "told"), [(0.123, "12 %"), (0.0123, "1.2 %"), (0.0995, "10 %"), (0, "0 %"), (-0.05, "-5.0 %")]
)
def test_percent(share, told):
    assert plain(words.percent(share)) == told


@pytest.mark.parametrize(
    ("ratio", "told"),
    [(0.88, "-12 %"), (1.07, "+7 %"), (1.004, "+0.4 %"), (1.0, "0 %"), (0.9999, "0 %"), (2.5, "+150 %")],
)
def test_change(ratio, told):
    assert plain(words.change(ratio)) == told


@pytest.mark.parametrize(("size", "told"), [(0, "0.0 MiB"), (3 * 2**19, "1.5 MiB"), (1234 * 2**20, "1,234 MiB")])
def test_mebibytes(size, told):
    assert plain(words.mebibytes(size)) == told


def test_counts_and_short_names():
    assert plain(words.count(1, "run")) == "1 run"
    assert plain(words.count(10_000, "run")) == "10,000 runs"
    assert plain(words.count(2, "query", "queries")) == "2 queries"
    assert words.short("0123456789abcdef") == "0123456789ab"
    assert plain(words.ms(1.23456)) == "1.235 ms"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0.0, 2.0, 4.0], ["0", "2", "4"]),
        ([1.0, 1.2, 1.4], ["1.0", "1.2", "1.4"]),
        ([-0.05, 0.0, 0.05], ["\N{MINUS SIGN}0.05", "0.00", "0.05"]),
        ([4000.0, 6000.0], ["4,000", "6,000"]),
        ([6269.0, 6269.5], ["6,269.0", "6,269.5"]),
        ([0.1, 1.0, 10.0], ["0.1", "1", "10"]),
        ([5.0], ["5"]),
        ([], []),
    ],
)
def test_round_numbers_are_short(values, told):
    assert words.round_numbers(values) == told


@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=5), st.integers(2, 10))
def test_two_ticks_are_never_told_alike(values, count):
    told = words.round_numbers(linear(values, 0.0, 100.0).ticks(count))
    assert len(set(told)) == len(told)


def test_a_change_has_its_sign_unless_nothing_is_told():
    assert words.change_ms(-22.1) == "\N{MINUS SIGN}22.10\N{NO-BREAK SPACE}ms"
    assert words.change_ms(0.12) == "+0.120\N{NO-BREAK SPACE}ms"
    assert words.change_ms(-0.0001) == "0.000\N{NO-BREAK SPACE}ms"
    assert words.change_percent(0.001) == "+0.1\N{NO-BREAK SPACE}%"
    assert words.change_percent(-0.85) == "\N{MINUS SIGN}85\N{NO-BREAK SPACE}%"
    assert words.change_percent(0.0) == "0\N{NO-BREAK SPACE}%"


def test_an_interval_is_told_where_both_ends_are_known():
    assert words.interval(1.0, 2.0, str) == "; 95 % interval 1.0 to 2.0"
    assert words.interval(None, 2.0, str) == words.interval(1.0, None, str) == ""


def test_a_long_list_tells_how_many_more_there_are():
    assert words.listed(["a", "b"]) == "a. b."
    assert words.listed(["a"] * 1500, at_most=2) == "a. a. And 1,498 more."
    assert words.joined("a.", "", "b.") == "a. b."
