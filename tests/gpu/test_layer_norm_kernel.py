"""LayerNorm as Triton compiles it: rows of real models, more than 2**31 elements, streams, CUDA graphs, Inductor."""

from functools import partial

import pytest
import torch

from kitsune.kernels.layer_norm import layer_norm, reference
from tests.kernel_checks import check_current_stream, check_graph

EPS = 1e-5
#: One rounding of the result; sums over thousands of rows for fp32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
ROWS = {
    "BERT": ((2048, 768), torch.float32),
    "BERT in bf16": ((2048, 768), torch.bfloat16),
    "GPT-2 in fp16": ((4096, 768), torch.float16),
    "OPT-6.7B": ((4096, 4096), torch.bfloat16),
    "the windows of Swin": ((8, 3136, 96), torch.bfloat16),
    "rows of no even length": ((777, 1001), torch.float32),
    "the longest rows": ((40, 65536), torch.bfloat16),
}


def inputs(device, shape, dtype):
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return x, *(torch.randn(shape[-1], device=device).to(dtype) for _ in range(2)), dy


def step(function, x, weight, bias, dy):
    """(output, gradients of what there is of x, weight and bias)."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in (x, weight, bias)]
    y = function(*leaves, EPS)
    return y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)


def assert_same(given, dtype):
    exact = step(reference, *(None if one is None else one.double() for one in given))
    for ours, wanted in zip(step(layer_norm, *given), exact, strict=True):
        assert ours.dtype == dtype
        atol = TOLERANCES[dtype] * (wanted.abs().max().item() + 1)
        torch.testing.assert_close(ours.double(), wanted, rtol=TOLERANCES[dtype], atol=atol)


@pytest.mark.parametrize("name", ROWS)
def test_it_computes_what_the_reference_does(device, name):
    shape, dtype = ROWS[name]
    assert_same(inputs(device, shape, dtype), dtype)


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, True), (False, False)])
def test_weight_and_bias_may_each_be_missing(device, has_weight, has_bias):
    x, weight, bias, dy = inputs(device, (2048, 768), torch.bfloat16)
    assert_same((x, weight if has_weight else None, bias if has_bias else None, dy), torch.bfloat16)


def test_a_mean_may_be_far_larger_than_the_deviation(device):
    x, *weights, dy = inputs(device, (2048, 768), torch.float32)
    x += 1e3
    exact = step(reference, *(one.double() for one in (x, *weights, dy)))
    for ours, wanted in zip(step(layer_norm, x, *weights, dy), exact, strict=True):
        atol = 1e-3 * (wanted.abs().max().item() + 1)
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-3, atol=atol)


@pytest.mark.parametrize(("weight", "bias"), [(1, 1), (512, 768), (768, 1)])
def test_a_weight_or_bias_of_another_length_is_refused_by_torch(device, weight, bias):
    given = [torch.ones(length, device=device) for length in (weight, bias)]
    with pytest.raises(RuntimeError, match="same shape"):
        layer_norm(torch.randn(64, 768, device=device), *given, EPS)


def test_there_may_be_more_elements_than_an_int32_counts(device):
    x, weight, bias, dy = inputs(device, (8, 4096), torch.bfloat16)
    many = torch.zeros(2**19 + 8, 4096, device=device, dtype=torch.bfloat16)
    slopes = torch.zeros_like(many)
    many[-8:], slopes[-8:] = x, dy
    y, dx, dweight, dbias = step(layer_norm, many, weight, bias, slopes)
    wanted, dwanted, _, _ = step(layer_norm, x, weight, bias, dy)
    assert torch.equal(y[-8:], wanted) and torch.equal(dx[-8:], dwanted)
    assert torch.equal(y[:-8], bias.expand(2**19, -1)) and not dx[:-8].any() and dweight.any() and dbias.any()


def test_it_runs_on_the_stream_that_is_current(device):
    given = inputs(device, (2048, 768), torch.bfloat16)
    check_current_stream(partial(step, layer_norm), given)


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    first, second = (inputs(device, (2048, 768), torch.bfloat16) for _ in range(2))
    second = [one.flip(0) for one in second]
    check_graph(partial(step, layer_norm), first, second)


def test_inductor_keeps_it_whole(device):
    given = inputs(device, (256, 768), torch.bfloat16)
    compiled = torch.compile(lambda x, *rest: 2 * layer_norm(x + 1, *rest), fullgraph=True)
    wanted = step(lambda x, *rest: 2 * layer_norm(x + 1, *rest), *given)
    for ours, one in zip(step(compiled, *given), wanted, strict=True):
        torch.testing.assert_close(ours, one)
