"""drawing/axes.py: ticks are round and few, scales are monotonic, and invalid values are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError, KitsuneError
from server.charts.drawing.axes import (
    LARGEST,
    finite,
    fitting,
    from_zero,
    linear,
    log_ticks,
    nice_ticks,
    span,
    whole_ticks,
)

VALUES = st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0, 1, 4, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (97, 103, 3, [98, 100, 102]),
        (-3, 3, 2, [-2, 0, 2]),
        (2.19e9, 3.41e9, 6, [2.2e9, 2.4e9, 2.6e9, 2.8e9, 3.0e9, 3.2e9, 3.4e9]),
    ],
)
def test_ticks_are_round(low, high, count, ticks):
    assert nice_ticks(low, high, count) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1, 100, [1, 2, 5, 10, 20, 50, 100]), (0.5, 6000, [1, 10, 100, 1000]), (3, 70, [5, 10, 20, 50])],
)
def test_logarithmic_ticks_are_round(low, high, ticks):
    assert log_ticks(low, high) == pytest.approx(ticks)


def test_what_is_counted_has_whole_ticks():
    assert whole_ticks(1, 4, 10) == [1, 2, 3, 4]
    assert whole_ticks(0, 5000, 5) == [0, 1000, 2000, 3000, 4000, 5000]
    assert whole_ticks(7, 7, 5) == [7]


@given(VALUES, st.integers(2, 12))
def test_ticks_lie_on_the_scale_and_are_neither_too_few_nor_too_many(values, count):
    scale = linear(values, 0.0, 100.0)
    ticks = scale.ticks(count)
    assert count / 3 <= len(ticks) <= 2 * count + 1
    assert all(-1e-3 <= scale.place(tick) <= 100 + 1e-3 for tick in ticks)
    assert len(set(ticks)) == len(ticks)


@given(VALUES)
def test_a_larger_value_never_lies_before_a_smaller_one(values):
    for scale in (linear(values, 10.0, 90.0), from_zero(values, 10.0, 90.0), fitting(values, 10.0, 90.0)):
        places = [scale.place(value) for value in sorted(values)]
        assert places == sorted(places)
        assert all(10 - 1e-6 <= place <= 90 + 1e-6 for place in places)


@given(VALUES)
def test_bars_have_zero_on_their_scale(values):
    scale = from_zero(values, 0.0, 100.0)
    assert scale.low <= 0 <= scale.high


def test_a_scale_is_logarithmic_where_some_values_are_much_larger():
    assert fitting([1.0, 30.0], 0, 1).is_log
    assert not fitting([1.0, 3.0], 0, 1).is_log
    assert not fitting([0.0, 30.0], 0, 1).is_log
    assert fitting([1.0, 100.0], 0, 100).place(10.0) == pytest.approx(50)


@pytest.mark.parametrize("values", [[], [0.0], [5.0, 5.0], [-2.0], [1e15], [1.0, 1.0 + 1e-15]])
def test_equal_values_and_none_at_all_have_a_scale(values):
    low, high = span(values)
    assert low < high
    assert all(low <= value <= high for value in values)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_what_has_no_place_is_refused(value):
    with pytest.raises(ChartError, match=r"^cannot be drawn: the arm 'a' is (nan|-?inf|1e\+300); only numbers"):
        finite(value, "the arm 'a'")
    with pytest.raises(KitsuneError):
        linear([1.0, value], 0, 1)
