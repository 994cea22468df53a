import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.submission.rebuilding.value_statistics import sample, spread_of


def twin(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(seed)
    return sample(spread_of(tensor), tuple(tensor.shape), dtype, "contiguous", generator)


@settings(max_examples=60)
@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=30))
def test_sampled_integers_stay_in_range(values):
    tensor = torch.tensor(values)
    found = twin(tensor)
    assert found.dtype == torch.int64
    assert found.shape == tensor.shape
    assert found.min() >= tensor.min()
    assert found.max() <= tensor.max()


@settings(max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30), st.sampled_from(["float32", "float64"]))
def test_sampled_floats_stay_in_range(values, dtype):
    tensor = torch.tensor(values, dtype=getattr(torch, dtype))
    found = twin(tensor)
    assert found.dtype == tensor.dtype
    assert within(found.min(), tensor.min(), tensor.max())
    assert within(found.max(), tensor.min(), tensor.max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_masks_of_the_largest_number_can_be_drawn(dtype, sign):
    kind = getattr(torch, dtype)
    largest = sign * torch.finfo(kind).max
    for values in ([largest] * 100, [0.0, largest] * 50):
        found = twin(torch.tensor(values, dtype=kind))
        assert found.isfinite().all() and found.abs().max() > abs(largest) / 4


def within(value, low, high):
    """Between the powers of two around a range, on the same side of 0."""
    return (low / 2 if low > 0 else low * 2) <= value <= (high * 2 if high > 0 else high / 2)


def numbers_of(tensor):
    spread = spread_of(tensor)
    return {spread.mean, spread.std, spread.low, spread.high}


@settings(max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5))
def test_of_few_numbers_only_powers_of_two_are_told(values):
    for number in numbers_of(torch.tensor(values)):
        assert number == 0 or abs(math.frexp(number)[0]) == 0.5


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 1000])
def test_no_number_of_a_tensor_is_in_its_spread(count):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.1 + 0.07
    assert not numbers_of(tensor) & set(tensor.tolist())


@pytest.mark.parametrize("tensor", [torch.rand(100), torch.rand(5) * 0.7, torch.tensor([1.0]), torch.zeros(3)])
def test_probabilities_stay_probabilities(tensor):
    found = twin(tensor)
    assert ((found >= 0) & (found <= 1)).all()


def test_the_largest_numbers_have_a_range_too():
    found = spread_of(
        torch.tensor([torch.finfo(torch.float64).max, torch.finfo(torch.float64).tiny], dtype=torch.float64)
    )
    assert 0 < found.low < found.high < math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_mean_and_deviation_are_kept(dtype):
    torch.manual_seed(0)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    tensor = (torch.randn(4000, dtype=wide) * 0.5 + (2 + 2j if dtype.is_complex else 2)).to(dtype)
    found = torch.view_as_real(twin(tensor)) if dtype.is_complex else twin(tensor).float()
    source = torch.view_as_real(tensor) if dtype.is_complex else tensor.float()
    assert abs(found.mean() - source.mean()) < 0.05
    assert abs(found.std() - source.std()) < 0.05


def test_same_seed_same_values_and_another_seed_others():
    tensor = torch.arange(100.0)
    assert torch.equal(twin(tensor), twin(tensor))
    assert not torch.equal(twin(tensor), twin(tensor, seed=1))


def test_ignored_labels_stay_apart_from_classes():
    labels = torch.tensor([3, -100, 1, 0, -100, 2] * 20)
    found = twin(labels)
    assert set(found.unique().tolist()) == {-100, 0, 1, 2, 3}
    assert 20 < int((found == -100).sum()) < 60


def test_padding_mask_stays_ones_and_then_zeros():
    mask = (torch.arange(10) < torch.tensor([[10], [7], [4], [9]])).long()
    found = twin(mask)
    assert (found[:, 0] == 1).all()
    assert (found[:, 1:] <= found[:, :-1]).all()


def test_constant_and_empty_tensors():
    assert torch.equal(twin(torch.ones(5, dtype=torch.long)), torch.ones(5, dtype=torch.long))
    assert torch.equal(twin(torch.full((100,), 2.5)), torch.full((100,), 2.5))
    assert torch.equal(twin(torch.full((4,), 2.5)), torch.full((4,), 2.0))
    assert twin(torch.empty(0, 3)).shape == (0, 3)
    assert twin(torch.empty(0, dtype=torch.long)).shape == (0,)
    assert twin(torch.tensor(True)).dtype == torch.bool


def test_positions_stay_sorted_from_first_to_last():
    found = twin(torch.tensor([0, 0, 1, 1, 2, 5]))
    assert (found[1:] >= found[:-1]).all()
    assert (found[0], found[-1]) == (0, 5)


def test_infinities_are_left_out():
    spread = spread_of(torch.tensor([0.0, float("-inf"), 1.0, float("nan")]))
    assert (spread.low, spread.high, spread.mean) == (0.0, 1.0, 0.5)


def test_layout():
    spread = spread_of(torch.randn(2, 3, 4, 4))
    found = sample(spread, (2, 3, 4, 4), "float32", "channels_last", torch.Generator().manual_seed(0))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert not found.is_contiguous()
