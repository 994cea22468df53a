"""LayerNorm against its eager reference: forward, every gradient, odd shapes, strides, dtypes, means, torch.compile."""

import pytest
import torch

from kitsune.kernels import layer_norm as kernel
from kitsune.kernels import rows
from kitsune.kernels.launch import DTYPES, MOST_IN_A_BLOCK
from kitsune.kernels.layer_norm import layer_norm, reference

EPS = 1e-5
#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def both(x, weight, bias):
    """(output, gradients of what there is of x, weight and bias) by the kernel and by the reference in fp64."""
    dy = torch.randn(x.shape, device=x.device).to(x.dtype)
    results = []
    for function, wide in ((layer_norm, False), (reference, True)):
        given = [None if one is None else one.detach() for one in (x, weight, bias)]
        leaves = [one if one is None else (one.double() if wide else one).requires_grad_() for one in given]
        y = function(*leaves, EPS)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)))
    return zip(*results, strict=True)


def assert_same(x, weight, bias, tolerance):
    for ours, exact in both(x, weight, bias):
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance * scale)


def inputs(device, shape, dtype):
    x = torch.randn(shape, device=device).to(dtype)
    return x, *(torch.randn(shape[-1], device=device).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (7, 100), (1, 1000), (300, 17), (2, 2100)])
def test_it_computes_what_the_reference_does(device, dtype, shape):
    torch.manual_seed(0)
    x, weight, bias = inputs(device, shape, dtype)
    assert layer_norm(x, weight, bias, EPS).dtype == dtype
    assert_same(x, weight, bias, TOLERANCES[dtype])


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, True), (False, False)])
def test_weight_and_bias_may_each_be_missing(device, has_weight, has_bias):
    x, weight, bias = inputs(device, (5, 40), torch.float32)
    assert_same(x, weight if has_weight else None, bias if has_bias else None, 2e-6)


def test_many_rows_are_shared_by_few_programs(device, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)
    assert rows.shares_of(15, *rows.tile_of(15, 530)[::2]) == (4, 4)
    assert_same(*inputs(device, (15, 530), torch.float32), 2e-6)


def test_a_mean_may_be_far_larger_than_the_deviation(device):
    """In fp32 the mean of the squares of such a row is known to 0.06, and so would be that less the mean's square."""
    torch.manual_seed(0)
    x, weight, bias = inputs(device, (4, 600), torch.float32)
    assert_same(1e3 + x, weight, bias, 1e-3)


def test_a_row_that_is_constant_becomes_the_bias(device):
    x, bias = torch.full((3, 50), 7.25, device=device), torch.randn(50, device=device)
    y = layer_norm(x, torch.randn(50, device=device), bias, EPS)
    torch.testing.assert_close(y, bias.expand(3, 50), rtol=0, atol=1e-3)


def test_rows_may_have_gaps_between_them_and_weights_other_dtypes(device):
    wide = torch.randn(4, 6, 40, device=device, dtype=torch.bfloat16)
    x, weight = wide.transpose(0, 1)[..., 3:30], torch.randn(54, device=device)[::2]
    bias = torch.randn(81, device=device, dtype=torch.float16)[::3]
    for ours, exact in both(x, weight, bias):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=2**-4)
    y = layer_norm(x, weight.requires_grad_(), bias.requires_grad_(), EPS)
    gradients = torch.autograd.grad(y.sum(), (weight, bias))
    assert [one.dtype for one in (y, *gradients)] == [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_nothing_is_launched_for_nothing(device, shape):
    x = torch.ones(shape, device=device, requires_grad=True)
    weight, bias = (torch.ones(shape[-1], device=device, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias, EPS).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight)) and torch.equal(bias.grad, torch.zeros_like(bias))


def test_the_same_input_gives_the_same_bits(device, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)
    x, weight, bias = inputs(device, (15, 530), torch.float32)
    _, means, scales = kernel.forward(x, weight, bias, EPS)
    first, second = (kernel.backward(x, x, weight, bias, means, scales) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_triton_does_not_reach_is_computed_all_the_same(device):
    x, weight = torch.randn(3, 8, device=device, dtype=torch.float64), torch.ones(8, device=device)
    assert torch.equal(layer_norm(x, weight, weight, EPS), reference(x, weight, weight, EPS))
    x = torch.randn(2, MOST_IN_A_BLOCK + 1, device=device)
    assert torch.equal(layer_norm(x, None, None, EPS), reference(x, None, None, EPS))


@pytest.mark.parametrize(("weight", "bias"), [(1, 1), (8, 8), (16, 1), (1, 16), (8, None), (None, 17)])
def test_a_weight_or_bias_of_another_length_is_refused_by_torch(device, weight, bias):
    given = [None if length is None else torch.ones(length, device=device) for length in (weight, bias)]
    with pytest.raises(RuntimeError, match="same shape"):
        layer_norm(torch.randn(4, 16, device=device), *given, EPS)


@pytest.mark.parametrize("is_affine", [True, False])
def test_the_operators_are_what_torch_asks_of_them(device, is_affine):
    x, *weights = (one.requires_grad_() for one in inputs(device, (3, 5), torch.float32))
    given = weights if is_affine else (None, None)
    torch.library.opcheck(kernel.forward, (x, *given, EPS), test_utils=CHECKS)
    y, means, scales = (one.detach() for one in kernel.forward(x, *given, EPS))
    torch.library.opcheck(kernel.backward, (y, y, *given, means, scales), test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    x, *weights = (one.requires_grad_() for one in inputs(device, (3, 5), torch.float32))
    compiled = torch.compile(lambda x: layer_norm(x, *weights, EPS), fullgraph=True, backend="aot_eager")
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), (x, *weights)) for f in (compiled, plain(weights)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def plain(weights):
    return lambda x: reference(x, *weights, EPS)
