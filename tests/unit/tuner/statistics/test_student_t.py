from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.statistics.student_t import quantile, two_sided_p, within

# Every table has these: 95 % and 99 %, two-sided.
TABLE = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    8: (2.306, 3.355),
    9: (2.262, 3.250),
    30: (2.042, 2.750),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_the_quantiles_are_those_of_the_tables(degrees):
    assert [quantile(degrees), quantile(degrees, 0.99)] == pytest.approx(TABLE[degrees], abs=6e-4)


@given(st.integers(1, 60), st.floats(0.01, 0.999))
def test_a_quantile_leaves_its_share_within(degrees, share):
    assert within(quantile(degrees, share), degrees) == pytest.approx(share, abs=1e-7)


def test_p_values():
    assert two_sided_p(0, 3) == 1
    assert two_sided_p(-2.776, 4) == pytest.approx(0.05, abs=1e-4)
    assert two_sided_p(inf, 1) == 0
