"""server/charts/drawing/figures.py: neighbouring tick labels differ, and changes have a sign."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.charts.drawing.figures import change_ms, change_percent, interval, joined, listed, round_numbers
from server.charts.drawing.scale import LARGEST, linear


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
    assert round_numbers(values) == told


@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=5), st.integers(2, 10))
def test_two_ticks_are_never_told_alike(values, count):
    told = round_numbers(linear(values, 0.0, 100.0).ticks(count))
    assert len(set(told)) == len(told)


def test_a_change_has_its_sign_unless_nothing_is_told():
    assert change_ms(-22.1) == "\N{MINUS SIGN}22.10\N{NO-BREAK SPACE}ms"
    assert change_ms(0.12) == "+0.120\N{NO-BREAK SPACE}ms"
    assert change_ms(-0.0001) == "0.000\N{NO-BREAK SPACE}ms"
    assert change_percent(0.001) == "+0.1\N{NO-BREAK SPACE}%"
    assert change_percent(-0.85) == "\N{MINUS SIGN}85\N{NO-BREAK SPACE}%"
    assert change_percent(0.0) == "0\N{NO-BREAK SPACE}%"


def test_an_interval_is_told_where_both_ends_are_known():
    assert interval(1.0, 2.0, str) == "; 95 % interval 1.0 to 2.0"
    assert interval(None, 2.0, str) == interval(1.0, None, str) == ""


def test_a_long_list_tells_how_many_more_there_are():
    assert listed(["a", "b"]) == "a. b."
    assert listed(["a"] * 1500, at_most=2) == "a. a. And 1,498 more."
    assert joined("a.", "", "b.") == "a. b."
