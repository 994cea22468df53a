"""Suite replays: how many kernels ran at once, and which took longest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replays import LONGEST, at_once_us, figures, longest
from kitsune.launches.execution.kernel_trace import Kernel

many = st.lists(
    st.builds(Kernel, st.sampled_from("abc"), st.integers(0, 100).map(float), st.integers(0, 30).map(float)),
    min_size=1,
)


def test_time_is_told_by_how_many_run():
    """aaaa
    bb    cc"""
    kernels = [Kernel("a", 10.0, 4.0), Kernel("b", 11.0, 2.0), Kernel("c", 20.0, 2.0)]
    assert at_once_us(kernels) == {0: 6.0, 1: 4.0, 2: 2.0}
    assert at_once_us([]) == {}


@given(many)
def test_all_of_the_time_and_all_kernels_are_in_it(kernels):
    found = at_once_us(kernels)
    begin, end = min(k.begin_us for k in kernels), max(k.begin_us + k.took_us for k in kernels)
    assert sum(found.values()) == pytest.approx(end - begin)
    assert sum(count * us for count, us in found.items()) == pytest.approx(sum(k.took_us for k in kernels))


def test_the_longest_are_told_with_how_often_they_ran():
    kernels = [Kernel("short", 0.0, 1.0), *[Kernel("long", 0.0, 3.0)] * 4]
    assert longest(kernels) == [("long", 12.0, 4), ("short", 1.0, 1)]
    assert len(longest([Kernel(str(number), 0.0, 1.0) for number in range(50)])) == LONGEST


def test_figures_name_the_graph():
    kernels = [Kernel("a", 0.0, 2.0), Kernel("a", 1.0, 2.0)]
    assert [(name, value) for name, value, *_ in figures("mlp/64 k8", kernels)] == [
        ("mlp/64 k8: from begin to end", 3.0),
        ("mlp/64 k8: kernels added up", 4.0),
        ("mlp/64 k8: kernels at once: 1", 2.0),
        ("mlp/64 k8: kernels at once: 2", 1.0),
        ("mlp/64 k8: a", 4.0),
    ]
