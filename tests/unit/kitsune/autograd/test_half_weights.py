"""Copies of weights in half precision as one autograd node: values, and the dtype and the sum of gradients."""

import pytest
import torch
from torch import nn

from kitsune.autograd import half_weights
from kitsune.autograd.half_weights import HalfWeights
from kitsune.base import optional_imports
from kitsune.errors import UnfitError
from kitsune.kernels.casts import cast_all

pytestmark = pytest.mark.skipif(not half_weights.HAS_GRAD_DTYPE, reason="this torch has no Tensor.grad_dtype")


def weights(*shapes):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def halves():
    return HalfWeights(torch.bfloat16)


def loss_of(copies):
    return sum((copy * copy * (number + 1)).float().sum() for number, copy in enumerate(copies))


def backward(making, loss, updated):
    making.keep_half(loss, updated)
    loss.backward()


@pytest.mark.parametrize("takes_half", [False, True])
def test_copies_and_gradients_have_the_values_that_autocast_would_give_them(takes_half):
    ours, theirs = weights((3, 4), (5,), (2, 3, 2, 2)), weights((3, 4), (5,), (2, 3, 2, 2))
    making = halves()
    copies = making.copies(ours)
    assert all(map(torch.equal, copies, (weight.bfloat16() for weight in theirs)))
    backward(making, loss_of(copies), ours if takes_half else [])
    loss_of([weight.bfloat16() for weight in theirs]).backward()
    for own, other in zip(ours, theirs, strict=True):
        assert own.grad.dtype == (torch.bfloat16 if takes_half else torch.float32)
        assert torch.equal(own.grad.float(), other.grad)


def test_a_layout_is_kept():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    making = halves()
    (copy,) = making.copies([weight])
    assert copy.stride() == weight.stride()
    backward(making, copy.sum(), [weight])
    assert weight.grad.stride() == weight.stride()


def test_many_weights_are_copied_in_parts(monkeypatch):
    monkeypatch.setattr(half_weights, "MOST_BYTES", 40)
    given = weights((5,), (5,), (30,), (1,), (2,), (3,))
    assert list(half_weights.parts_of(given)) == [slice(0, 2), slice(2, 3), slice(3, 6)]
    assert all(map(torch.equal, halves().copies(given), (weight.bfloat16() for weight in given)))


@pytest.mark.parametrize(("is_there", "expected"), [(True, cast_all), (False, torch._foreach_copy_)])
def test_on_a_gpu_kitsunes_kernel_copies_where_there_is_triton(monkeypatch, is_there, expected):
    def refuse(*_, **__):
        raise UnfitError("this needs triton")

    if not is_there:
        monkeypatch.setattr(optional_imports, "load", refuse)
    assert half_weights.kernel_of_casts.__wrapped__() is expected


def test_a_frozen_weight_is_copied_without_a_gradient():
    frozen, trained = weights((2, 2), (2, 2))
    frozen.requires_grad_(False)
    making = halves()
    first, second = making.copies([frozen, trained])
    assert not first.requires_grad
    backward(making, (first * second).sum(), [frozen, trained])
    assert frozen.grad is None
    assert trained.grad is not None


def copied_twice(making, weight):
    first, second = making.copies([weight]), making.copies([weight])
    return (first[0] * 1.01).sum() + (second[0] * 256).sum()


def penalised(making, weight):
    return (making.copies([weight])[0] * 256).sum().float() + (weight * 1.01).sum()


@pytest.mark.parametrize(("use", "small"), [(copied_twice, torch.tensor(1.01).bfloat16()), (penalised, 1.01)])
def test_gradients_of_a_weight_that_is_read_twice_are_summed_in_fp32(use, small):
    (weight,) = weights((64,))
    making = halves()
    backward(making, use(making, weight), [weight])
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, (torch.tensor(256.0) + small).expand(64))  # in bf16 this would be 256 or 258


def test_weights_that_another_optimizer_updates_have_gradients_in_fp32():
    ours, others = weights((4,), (4,))
    making = halves()
    backward(making, loss_of(making.copies([ours, others])), [ours])
    assert (ours.grad.dtype, others.grad.dtype) == (torch.bfloat16, torch.float32)


def add_half(weight):
    weight.grad.add_(0.5)


@pytest.mark.parametrize(
    "hook",
    [
        lambda weight: weight.register_hook(lambda gradient: gradient + 0.5),
        lambda weight: weight.register_post_accumulate_grad_hook(add_half),
    ],
)
def test_a_hook_on_a_gradient_sees_fp32(hook):
    (weight,) = weights((4,))
    hook(weight)
    making = halves()
    backward(making, (making.copies([weight])[0] * 256).sum(), [weight])
    assert torch.equal(weight.grad, torch.full((4,), 256.5))


def test_each_backward_is_decided_anew():
    (weight,) = weights((4,))
    making = halves()
    dtypes = []
    for at in range(4):
        weight.grad = None
        loss = making.copies([weight])[0].sum()
        if at == 1:  # an error between forward and backward
            continue
        backward(making, loss, [weight] if at < 3 else [])
        dtypes.append(weight.grad.dtype)
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_what_the_user_does_with_gradients_in_between_is_as_ever():
    (weight,) = weights((4,))
    making = halves()
    backward(making, making.copies([weight])[0].sum(), [weight])
    weight.grad = torch.zeros(4)
    weight.grad = None
    (weight * 1.01).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 1.01))


@pytest.mark.parametrize("frozen", [False, True])
def test_undo_gives_the_user_gradients_in_fp32(frozen):
    (weight,) = weights((4,))
    making = halves()
    backward(making, making.copies([weight])[0].sum(), [weight])
    weight.requires_grad_(not frozen)
    making.undo()
    assert weight.grad.dtype == weight.grad_dtype == torch.float32
    assert torch.equal(weight.grad, torch.ones(4))


def test_a_function_gets_copies_at_their_positions_only():
    one, other = weights((2,), (2,))
    x = torch.ones(2)
    seen = halves().with_copies(lambda *given: given, [1])(x, one, other)
    assert seen[0] is x
    assert seen[1].dtype == torch.bfloat16
    assert seen[2] is other


def test_without_grad_dtype_gradients_are_fp32(monkeypatch):
    monkeypatch.setattr(half_weights, "HAS_GRAD_DTYPE", False)
    (weight,) = weights((4,))
    making = halves()
    backward(making, making.copies([weight])[0].sum(), [weight])
    assert weight.grad.dtype == torch.float32
    making.undo()
