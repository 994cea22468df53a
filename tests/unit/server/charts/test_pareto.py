"""server/charts/pareto.py: the front is correct, everything is inside the drawing, thinning keeps what matters."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ChartError
from server.charts.pareto import Point, front, pareto
from tests.unit.server.charts.drawings import LABELS, check_chart, check_told, description, found, texts, titles, widest

NBSP = "\N{NO-BREAK SPACE}"
FEW = st.integers(1, 6)
POINTS = st.builds(
    Point,
    LABELS,
    st.floats(1e-3, 1e6) | FEW.map(float),
    st.integers(0, 2**45) | FEW,
    st.sampled_from(["", "/runs/1", "#trial-2"]),
    st.booleans(),
    st.booleans(),
)


def beats(one: Point, other: Point) -> bool:
    """Whether one dominates the other: as good in both, and better in one."""
    is_as_good = one.step_ms <= other.step_ms and one.peak_bytes <= other.peak_bytes
    return is_as_good and (one.step_ms, one.peak_bytes) != (other.step_ms, other.peak_bytes)


@given(st.lists(POINTS, max_size=40))
def test_the_front_is_what_nothing_beats(points):
    ahead = front(points)
    assert set(ahead) == {
        index for index, point in enumerate(points) if not any(beats(other, point) for other in points)
    }
    assert [points[index].step_ms for index in ahead] == sorted(points[index].step_ms for index in ahead)


@given(st.lists(POINTS, max_size=15))
def test_any_picture_is_whole(points):
    chart = pareto(points)
    check_chart(chart)
    for point in points:
        check_told(chart, point.label)


PLAIN = [
    Point("eager", 10.0, 2 * 2**30, "/t/0", False, True),
    Point("amp", 5.0, 3 * 2**30, "/t/1", True, False),
    Point("compile", 6.0, 2**30, "", False, False),
    Point("worse", 11.0, 4 * 2**30, "", False, False),
]


def test_each_point_has_a_shape_words_and_a_link():
    root = widest(pareto(PLAIN))
    assert {each.get("class") for each in found(root, "circle")} == {"front", "behind"}
    assert len(found(root, "path", "chosen")) == len(found(root, "path", "baseline")) == 2  # one is the legend's
    assert [link.get("href") for link in found(root, "a")] == ["/t/0", "/t/1"]
    assert f"amp: 5.000{NBSP}ms, 3,072{NBSP}MiB (the plan)" in titles(root)
    assert "worse: 11.00" in description(root)


def test_what_matters_is_named_beside_its_mark():
    assert {"eager", "amp", "compile"} <= set(texts(widest(pareto(PLAIN))))
    assert "worse" not in texts(widest(pareto(PLAIN)))


def test_the_front_is_a_line_of_steps():
    (line, _) = found(widest(pareto(PLAIN)), "path", "best")
    corners = [tuple(map(float, each.split())) for each in line.get("d").removeprefix("M").split(" L")]
    assert len(corners) == 1 + 2 * 2
    assert all(before[0] == after[0] or before[1] == after[1] for before, after in pairwise(corners))


def test_a_logarithmic_axis_says_so():
    far = [*PLAIN, Point("slow", 1000.0, 2**30, "", False, False)]
    assert {"ms per step, logarithmic", "peak memory, MiB"} <= set(texts(widest(pareto(far))))
    assert "ms per step" in texts(widest(pareto(PLAIN)))


def test_many_points_are_thinned_and_that_is_said():
    rnd = random.Random(1)
    many = [Point(str(n), rnd.uniform(1, 9), rnd.randrange(2**30, 2**33), "", n == 7, n == 0) for n in range(5000)]
    chart = pareto(many)
    check_chart(chart)
    root = widest(chart)
    assert len(found(root, "circle")) < 700
    assert len(found(root, "path", "chosen")) == 2
    assert any(words.startswith("Drawn are ") for words in texts(root))
    assert "of 5,000 configurations: each of the others lies within" in description(root)


@pytest.mark.parametrize("points", [[], PLAIN[:1], [PLAIN[0]] * 4])
def test_few_and_equal_points_are_drawn(points):
    check_chart(pareto(points))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_place_is_refused(value):
    with pytest.raises(ChartError, match="the step time of 'a'"):
        pareto([Point("a", value, 1, "", False, False)])


def test_a_hostile_address_is_refused():
    with pytest.raises(ChartError, match="neither a path"):
        pareto([Point("a", 1.0, 1, "javascript:alert(1)", False, False)])
