import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tuner.numerics.distance import HOST, Lengths

sizes = st.lists(st.integers(0, 5), max_size=6)


def test_none_counts_as_zeros_and_dtypes_mix():
    ones = torch.ones(4)
    assert HOST.norm([ones, None]) == 2.0
    assert HOST.distance([ones, None], [None, None]) == 2.0
    assert HOST.distance([ones.bfloat16()], [ones.double() * 2]) == 2.0
    assert HOST.distance([torch.tensor(3)], [torch.tensor(5)]) == 2.0
    assert HOST.norm([torch.tensor([3 + 4j])]) == 5.0
    assert HOST.norm([torch.tensor([3, 4])]) == 5.0


@given(sizes, st.integers(0, 2**31))
def test_lengths_of_lists_are_those_of_all_elements_together(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = ([torch.randn(size, generator=generator) for size in sizes] for _ in range(2))
    found = HOST.lengths(ours, theirs)
    a, b = (torch.cat([*tensors, torch.zeros(0)]).double() for tensors in (ours, theirs))
    assert found.size == pytest.approx(float(a.norm()), abs=1e-12)
    assert found.their_size == pytest.approx(float(b.norm()), abs=1e-12)
    assert found.distance == pytest.approx(float((a - b).norm()), rel=1e-6, abs=1e-12)
    assert found.density == pytest.approx(float(b.norm()) / math.sqrt(max(1, sum(sizes))), abs=1e-12)
    assert list(found.elements) == sizes


def test_of_no_tensors():
    assert HOST.lengths([], []) == Lengths((), (), (), ())


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        HOST.lengths([torch.ones(1)], [])
