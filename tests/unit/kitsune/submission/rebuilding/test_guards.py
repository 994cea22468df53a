"""Operators that trust their arguments: each of these calls crashed torch 2.13 or read past a tensor."""

import pytest
import torch

from kitsune.errors import ArchiveError
from kitsune.submission.format.blocks import Block, Node
from kitsune.submission.format.targets import target
from kitsune.submission.rebuilding.decode import Decoder
from kitsune.submission.rebuilding.guards import GUARDS


def run(op: str, *args, **kwargs):
    """The operator as a node of an archive, tensors handed in from outside."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    names = [f"x{index}" for index in range(len(tensors))]
    numbers = iter(range(len(tensors)))
    written = [f"%{next(numbers)}" if isinstance(arg, torch.Tensor) else arg for arg in args]
    block = Block(names, [Node(op, written, kwargs)], [f"%{len(names)}"])
    return Decoder(torch.device("cpu"), randomness=True).module(block, names, {})(*tensors)


@pytest.mark.parametrize("op", GUARDS)
def test_guarded_operator_exists_and_takes_what_the_guard_returns(op):
    position, _ = GUARDS[op]
    assert "Tensor" in str(target(op)._schema.arguments[position].type)


def test_attention_over_values_that_are_fewer_than_keys_is_refused():
    q, k, v = torch.randn(2, 2, 64, 8), torch.randn(2, 2, 64, 8), torch.randn(2, 2, 6, 8)
    with pytest.raises(ArchiveError, match="does not fit key"):
        run("aten.scaled_dot_product_attention.default", q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert torch.equal(run("aten.scaled_dot_product_attention.default", q, k, k, is_causal=True), expected)


@pytest.mark.parametrize(("shape", "dim"), [((3, 1), 0), ((1, 1), 0), ((1, 1), 1)])
def test_weight_norm_of_other_magnitudes_is_refused(shape, dim):
    with pytest.raises(ArchiveError, match=r"g of shape .* does not fit v"):
        run("aten._weight_norm.default", torch.randn(100, 64), torch.randn(shape), dim)


@pytest.mark.parametrize("dim", [0, 1, -1, 2])
def test_weight_norm_that_fits_is_computed(dim):
    v = torch.randn(5, 4, 3)
    g = torch.norm_except_dim(v, 2, dim)
    assert torch.equal(run("aten._weight_norm.default", v, g, dim), torch._weight_norm(v, g, dim))


def test_labels_of_ctc_stay_within_the_classes():
    scores = torch.randn(10, 2, 5).log_softmax(-1)
    hostile, limited = torch.tensor([[1, 7000, 2], [3, -7000, 2]]), torch.tensor([[1, 4, 2], [3, 0, 2]])
    args = [10, 10], [3, 3], 0
    expected = torch.ops.aten.ctc_loss.IntList(scores, limited, *args)
    assert torch.equal(run("aten.ctc_loss.IntList", scores, hostile, *args), expected)


def test_offsets_of_embedding_bag_are_not_negative():
    weight, indices = torch.randn(9, 3), torch.tensor([1, 2, 3, 4])
    found = run("aten.embedding_bag.default", weight, indices, torch.tensor([0, -30]))
    expected = torch.ops.aten.embedding_bag.default(weight, indices, torch.tensor([0, 0]))
    assert torch.equal(found[0], expected[0])


def test_samples_of_fractional_pooling_are_shares():
    x, samples = torch.randn(2, 3, 8, 8), torch.full((2, 3, 2), 1e8)
    found = run("aten.fractional_max_pool2d.default", x, [2, 2], [3, 3], samples)
    expected = torch.ops.aten.fractional_max_pool2d.default(x, [2, 2], [3, 3], torch.ones(2, 3, 2))
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("padding", [1, 2])
@pytest.mark.parametrize(("value", "bounded"), [(float("nan"), 0.0), (3.4e38, 1e4), (-0.25, -0.25)])
def test_grid_holds_no_nan_and_nothing_far_away(value, bounded, padding):
    x, grid = torch.randn(2, 3, 4, 4), torch.full((2, 4, 4, 2), value)
    found = run("aten.grid_sampler.default", x, grid, 0, padding, False)
    expected = torch.ops.aten.grid_sampler.default(x, torch.full_like(grid, bounded), 0, padding, False)
    assert torch.equal(found, expected)


def test_guarded_argument_must_be_given_by_position():
    with pytest.raises(ArchiveError, match="needs 3 arguments by position"):
        run("aten.scaled_dot_product_attention.default", torch.ones(2, 2), torch.ones(2, 2), value="%0")
