"""server/charts/samples.py: every block is a dot, in order, and the quartiles are correct."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.samples import Strip, quartiles, samples
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

NBSP = "\N{NO-BREAK SPACE}"
PLAIN = [Strip("as given", [3.0, 1.0, 2.0, 4.0, 5.0]), Strip("plan", [1.0]), Strip("declined", [])]


@given(st.lists(st.builds(Strip, LABELS, st.lists(TAKEN_MS, max_size=20)), min_size=1, max_size=6))
def test_any_picture_is_whole(strips):
    chart = samples(strips)
    check_chart(chart)
    if any(strip.values_ms for strip in strips):
        for strip in strips:
            check_told(chart, strip.label)


@given(st.lists(TAKEN_MS, min_size=1))
def test_quartiles_part_the_blocks(values):
    found_ = quartiles(values)
    assert found_ is not None
    assert found_.median_ms == pytest.approx(statistics.median(values))
    for bound, share in ((found_.low_ms, 0.25), (found_.high_ms, 0.75)):
        assert sum(value < bound * (1 - 1e-9) for value in values) <= share * (len(values) - 1) + 1
        assert sum(value > bound * (1 + 1e-9) for value in values) <= (1 - share) * (len(values) - 1) + 1


def test_every_block_is_a_dot_lower_than_the_one_before():
    dots = found(widest(samples(PLAIN)), "circle", "block")
    assert len(dots) == 6 + 1  # and the legend's
    first = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in dots[:5]]
    assert [y for _, y in first] == sorted({y for _, y in first})
    assert [x for x, _ in sorted(first)] == [first[index][0] for index in (1, 2, 0, 3, 4)]


def test_numbers_are_told():
    root = widest(samples(PLAIN))
    assert {"as given", f"3.000{NBSP}ms", "plan", f"1.000{NBSP}ms", "declined", "no blocks"} <= set(texts(root))
    assert f"as given, block 4: 4.000{NBSP}ms" in titles(root)
    assert (
        f"as given: median 3.000{NBSP}ms of 5{NBSP}blocks, half of them within 2.000{NBSP}ms and 4.000{NBSP}ms, "
        f"all within 1.000{NBSP}ms and 5.000{NBSP}ms."
    ) in description(root)


@pytest.mark.parametrize("strips", [[], [Strip("a", [])], [Strip("a", [2.0])], [Strip("a", [2.0] * 9)]])
def test_few_and_equal_blocks_are_drawn(strips):
    check_chart(samples(strips))


def test_many_blocks_are_thinned_and_that_is_said():
    chart = samples([Strip("a", [1 + n % 97 / 97 for n in range(5000)])])
    check_chart(chart)
    assert len(found(widest(chart), "circle", "block")) <= 601
    assert "of 5,000 blocks: each of the others" in description(widest(chart))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_place_is_refused(value):
    with pytest.raises(ChartError, match="a block of 'a'"):
        samples([Strip("a", [1.0, value])])
