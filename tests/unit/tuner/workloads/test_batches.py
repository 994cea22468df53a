import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tuner.building.dropout import disable_dropout, dropout_off
from tuner.workloads.batches import converted, varied

ROWS = st.integers(1, 6)
SEEDS = st.integers(0, 2**31)


@given(ROWS, SEEDS)
def test_shapes_dtypes_strides_and_structure_stay(rows, seed):
    image = torch.rand(rows, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = ({"image": image, "flag": True, "scale": torch.tensor(2.0)}, torch.randint(0, 9, (rows,)))
    x, y = varied(batch, seed)
    assert x["image"].shape == image.shape
    assert x["image"].stride() == image.stride()
    assert (x["flag"], float(x["scale"])) == (True, 2.0)
    assert y.dtype == torch.int64
    again = varied(batch, seed)
    assert torch.equal(again[0]["image"], x["image"])
    assert torch.equal(again[1], y)


@given(st.integers(2, 6), SEEDS)
def test_values_stay_in_range(rows, seed):
    probabilities = torch.softmax(torch.randn(rows, 5), dim=1)
    labels = torch.arange(rows * 3).reshape(rows, 3)
    x, y = varied((probabilities, labels), seed)
    assert torch.allclose(x.sum(dim=1), torch.ones(rows))
    assert float(x.min()) >= float(probabilities.min()) - 1e-6
    assert float(x.max()) <= float(probabilities.max()) + 1e-6
    assert sorted(y.tolist()) == labels.tolist()


@given(SEEDS)
def test_masks_of_minus_infinity_do_not_become_nan(seed):
    mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0], [0.0, -math.inf]])
    x, _ = varied((mask, None), seed)
    assert not torch.isnan(x).any()
    assert torch.isfinite(x[:, 0]).all()


@given(SEEDS)
def test_what_is_no_batch_of_rows_is_left_alone(seed):
    nodes, edges = torch.randn(5, 3), torch.randint(0, 5, (2, 9))
    found = [varied(((nodes, edges), None), seed + more)[0] for more in range(5)]
    assert all(torch.equal(same, edges) for _, same in found)
    assert any(not torch.equal(x, nodes) for x, _ in found)  # one order in 120 is the old one


@pytest.mark.parametrize("tensor", [torch.rand(1, 8), torch.arange(8).reshape(1, 8)])
def test_a_batch_of_one_row_changes_too(tensor):
    others = [varied((tensor, None), seed)[0] for seed in range(5)]
    assert any(not torch.equal(other, tensor) for other in others)
    assert all(other.min() >= tensor.min() and other.max() <= tensor.max() for other in others)


def test_the_global_generator_does_not_move():
    before = torch.get_rng_state()
    varied((torch.rand(4, 4, generator=torch.Generator()), None), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_converted_changes_floats_only():
    x, y = converted((torch.ones(2), torch.ones(2, dtype=torch.int32)), torch.float64)
    assert (x.dtype, y.dtype) == (torch.float64, torch.int32)


def test_dropout_is_off_inside_and_as_before_outside():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        torch.nn.Dropout(0.5),
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
    )
    rnn = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    x = torch.randn(3, 4, 8)
    functions = F.dropout, torch.dropout, F.scaled_dot_product_attention

    def run() -> torch.Tensor:
        attended = F.scaled_dot_product_attention(x, x, x, None, 0.5, False, scale=0.3)
        return model(x) + rnn(x)[0] + F.dropout(x, 0.5) + F.dropout(input=x, p=0.5, training=True) + attended

    assert not torch.equal(run(), run())
    with dropout_off():
        disable_dropout(model)
        disable_dropout(rnn)
        before = torch.get_rng_state()
        assert torch.equal(run(), run())
        assert torch.equal(before, torch.get_rng_state())
    assert functions == (F.dropout, torch.dropout, F.scaled_dot_product_attention)
    assert not torch.equal(run(), run())
