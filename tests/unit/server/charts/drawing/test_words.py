"""Formatting of numbers and times on pages."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.plan import Interval
from server.charts.drawing import words

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
