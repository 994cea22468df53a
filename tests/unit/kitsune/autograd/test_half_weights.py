"""Copies of weights in half precision as one autograd node: values, and the dtype and the sum of gradients."""

import pytest
import torch
from torch import nn

from kitsune.autograd import half_weights
from kitsune.autograd.half_weights import HalfWeights

pytestmark = pytest.mark.skipif(not half_weights.HAS_GRAD_DTYPE, reason="this torch has no Tensor.grad_dtype")


def weights(*shapes):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def halves(takes_half):
    return HalfWeights(torch.bfloat16, lambda: takes_half)


def loss_of(copies):
    return sum((copy * copy * (number + 1)).float().sum() for number, copy in enumerate(copies))


@pytest.mark.parametrize("takes_half", [False, True])
def test_copies_and_gradients_have_the_values_that_autocast_would_give_them(takes_half):
    ours, theirs = weights((3, 4), (5,), (2, 3, 2, 2)), weights((3, 4), (5,), (2, 3, 2, 2))
    copies = halves(takes_half).of(ours)
    assert all(map(torch.equal, copies, (weight.bfloat16() for weight in theirs)))
    loss_of(copies).backward()
    loss_of([weight.bfloat16() for weight in theirs]).backward()
    for own, other in zip(ours, theirs, strict=True):
        assert own.grad.dtype == (torch.bfloat16 if takes_half else torch.float32)
        assert torch.equal(own.grad.float(), other.grad)


def test_a_layout_is_kept():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    (copy,) = halves(True).of([weight])
    assert copy.stride() == weight.stride()
    copy.sum().backward()
    assert weight.grad.stride() == weight.stride()


def test_a_frozen_weight_is_copied_without_a_gradient():
    frozen, trained = weights((2, 2), (2, 2))
    frozen.requires_grad_(False)
    first, second = halves(True).of([frozen, trained])
    assert not first.requires_grad
    (first * second).sum().backward()
    assert frozen.grad is None
    assert trained.grad is not None


def test_the_gradients_of_a_weight_that_is_copied_twice_are_summed_in_fp32():
    (weight,) = weights((64,))
    making = halves(True)
    first, second = making.of([weight]), making.of([weight])
    (first[0] * 1.01).sum().backward()
    (second[0] * 256).sum().backward()
    assert weight.grad.dtype == torch.float32
    exact = torch.tensor(1.01).bfloat16().float() + 256  # in bf16 this would be 256 or 258
    assert torch.equal(weight.grad, exact.expand(64))


def test_two_steps_one_after_the_other_are_not_taken_for_two_copies():
    (weight,) = weights((4,))
    making = halves(True)
    for _ in range(3):
        weight.grad = None
        making.of([weight])[0].sum().backward()
        assert weight.grad.dtype == torch.bfloat16


def test_an_evaluation_leaves_gradients_in_half_precision():
    (weight,) = weights((4,))
    making = halves(True)
    with torch.no_grad():
        making.of([weight])
    making.of([weight])[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_undo_gives_the_user_gradients_in_fp32():
    (weight,) = weights((4,))
    making = halves(True)
    making.of([weight])[0].sum().backward()
    making.undo([weight])
    assert weight.grad.dtype == weight.grad_dtype == torch.float32
    assert torch.equal(weight.grad, torch.ones(4))


def test_parameters_that_a_user_has_in_half_precision_stay_so():
    own = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    own.sum().backward()
    halves(True).undo([own])
    assert own.grad.dtype == torch.bfloat16


def test_a_function_gets_copies_at_their_positions_only():
    one, other = weights((2,), (2,))
    x = torch.ones(2)
    seen = halves(False).passed_to(lambda *given: given, [1])(x, one, other)
    assert seen[0] is x
    assert seen[1].dtype == torch.bfloat16
    assert seen[2] is other


def test_without_grad_dtype_gradients_are_fp32(monkeypatch):
    monkeypatch.setattr(half_weights, "HAS_GRAD_DTYPE", False)
    (weight,) = weights((4,))
    making = halves(True)
    making.of([weight])[0].sum().backward()
    assert weight.grad.dtype == torch.float32
    making.undo([weight])
