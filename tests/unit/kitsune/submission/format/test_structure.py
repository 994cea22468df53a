from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.submission.format.structure import assemble, checked_structure, describe, leaf_paths, substitute


class Leaf:
    pass


def is_leaf(value):
    return isinstance(value, Leaf)


KEYS = st.sampled_from(["input_ids", "mask", "x1", "_y"])
VALUES = st.recursive(
    st.builds(Leaf) | st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9) | st.just("mean"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_value_comes_back_from_its_structure_and_leaves(value):
    leaves = []
    structure = describe(value, is_leaf, leaves, "x")
    assert checked_structure(structure) == structure
    assert assemble(structure, leaves) == value
    assert [number for number, _ in leaf_paths(structure)] == list(range(len(leaves)))
    for number, path in leaf_paths(structure):
        found = value
        for key in path:
            found = found[key]
        assert found is leaves[number]


@given(VALUES)
def test_substitute_replaces_leaves_in_order(value):
    leaves = []
    describe(value, is_leaf, leaves, "x")
    others = [Leaf() for _ in leaves]
    again = []
    describe(substitute(value, is_leaf, iter(others)), is_leaf, again, "x")
    assert again == others


def test_order_of_a_dict_does_not_matter():
    one, two = Leaf(), Leaf()
    first, second = [], []
    assert describe({"b": one, "a": two}, is_leaf, first, "x") == describe({"a": two, "b": one}, is_leaf, second, "x")
    assert first == second == [two, one]


def test_named_tuple_stays_named():
    point = namedtuple("point", "x y")
    assert substitute(point(Leaf(), 2), is_leaf, iter([1])) == point(1, 2)
    assert type(substitute(point(Leaf(), 2), is_leaf, iter([1]))) is point


@pytest.mark.parametrize(
    ("value", "named"),
    [({"a b": 1}, "x has the key 'a b'"), ({1: 2}, "x has the key 1"), ([{"y": {3}}], r"x\[0\]\['y'\] is a set"),
     (float("nan"), "x is a float"), ("a\nb", "x is a str")],
)  # fmt: skip
def test_other_values_are_named(value, named):
    with pytest.raises(ValueError, match=named):
        describe(value, is_leaf, [], "x")
