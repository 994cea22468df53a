"""dropout(x + bias) + residual on a GPU: real shapes, the mask, streams, CUDA graphs, torch.compile, large tensors."""

import math

import pytest
import torch

from kitsune.kernels import dropout_add as kernel
from kitsune.kernels.dropout_add import dropout_add, reference
from kitsune.kernels.launch import DTYPES

#: One unit in the last place.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def gradients(function, x, residual, bias, dy):
    """(output, gradients of x, residual and, if there is one, bias) of function(x, residual, bias)."""
    leaves = [one.detach().requires_grad_() for one in (x, residual, bias) if one is not None]
    y = function(*leaves[:2], None if bias is None else leaves[2])
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def check(device, shape, dtype, p, with_bias=True):
    x, residual, dy = torch.randn(3, *shape, device=device).to(dtype)
    bias = torch.randn(shape[-1], device=device).to(dtype) if with_bias else None
    seed = torch.randint(kernel.SEEDS, (1,), device=device)
    ones = torch.ones(shape, device=device)
    kept = kernel.forward(ones, torch.zeros_like(ones), None, seed, p) != 0
    ours = gradients(lambda x, residual, bias: kernel.forward(x, residual, bias, seed, p), x, residual, bias, dy)
    wide = [None if one is None else one.double() for one in (x, residual, bias)]
    exact = gradients(lambda x, residual, bias: reference(x, residual, p, bias, True, kept), *wide, dy)
    for one, other in zip(ours, exact, strict=True):
        scale = other.abs().max().item() + 1
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 128, 768), (4, 1024, 768), (4096, 4096)])
def test_shapes_of_bert_gpt2_and_llama(device, dtype, shape):
    check(device, shape, dtype, 0.1)


@pytest.mark.parametrize("shape", [(1, 1), (7, 50257), (100003, 3)])
def test_shapes_that_do_not_fit_the_tiles(device, shape):
    check(device, shape, torch.bfloat16, 0.1)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_chance_computes_what_the_reference_does(device, p, with_bias):
    check(device, (2048, 768), torch.bfloat16, p, with_bias)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(4096, 4096), (65536, 100)])
def test_the_mask_is_as_good_as_thrown_dice(device, shape, p):
    torch.manual_seed(0)
    ones = torch.ones(shape, device=device)
    kept = (dropout_add(ones, torch.zeros_like(ones), p) != 0).double()
    assert abs(kept.mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    for along in (0, 1):
        share = kept.mean(along)
        assert (share - (1 - p)).abs().max() < 6.5 * math.sqrt(p * (1 - p) / kept.shape[along])
    mild = kept - (1 - p)
    for rows, columns in ((0, 1), (0, 8), (1, 0), (4, 0), (8, 0), (16, 0), (1, 1)):
        product = mild[rows:, columns:] * mild[: shape[0] - rows, : shape[1] - columns]
        assert abs(product.mean().item()) < 5 * p * (1 - p) / math.sqrt(product.numel())


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(device, with_bias):
    x = torch.ones(4096, 768, device=device)
    bias = torch.zeros(768, device=device) if with_bias else None
    y, dx, dresidual, *dbias = gradients(lambda *given: dropout_add(*given[:2], 0.1, given[2]), x, 0 * x, bias, x)
    assert torch.equal(dx, y) and torch.equal(dresidual, x)
    assert all(torch.allclose(one, y.sum(0)) for one in dbias)


def test_the_same_seed_gives_the_same_bits(device):
    x, bias = torch.randn(4096, 768, device=device, dtype=torch.bfloat16), torch.randn(768, device=device)
    seed = torch.randint(kernel.SEEDS, (1,), device=device)
    assert torch.equal(*(kernel.forward(x, x, bias, seed, 0.1) for _ in range(2)))
    assert all(map(torch.equal, *(kernel.backward(x, bias, seed, 0.1) for _ in range(2))))


def test_it_is_launched_on_the_current_stream(device):
    x, later = torch.zeros(512, 768, device=device), torch.ones(1, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x += later
        y = dropout_add(x, x, 0.5)
    torch.cuda.current_stream(device).wait_stream(side)
    assert sorted(y.unique().tolist()) == [1, 3]


def test_nothing_waits_for_the_device(device):
    x = torch.randn(512, 768, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(lambda *given: dropout_add(*given[:2], 0.1, given[2]), x, x, x[0], x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_replay_of_a_captured_step_has_a_mask_of_its_own_and_one_for_both_passes(device):
    x, dy = torch.ones(2, 2048, 768, device=device)
    bias = torch.zeros(768, device=device)

    def step():
        return gradients(lambda *given: dropout_add(*given[:2], 0.5, given[2]), x, torch.zeros_like(x), bias, dy)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx, _, dbias = step()
    seen = []
    for value in (1.0, 3.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, dx * value)
        torch.testing.assert_close(dbias, dx.sum(0))
        seen.append((y == 0).clone())
    assert not any(torch.equal(seen[one], seen[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_a_compiled_model_draws_anew_each_time_and_keeps_its_mask(device):
    x, bias = torch.ones(512, 768, device=device), torch.zeros(768, device=device)

    def function(x, residual, bias):
        return dropout_add(x * 2, residual, 0.5, bias)

    compiled = torch.compile(function, fullgraph=True)
    (y, dx, dresidual, dbias), (another, *_) = (gradients(compiled, x, 0 * x, bias, x) for _ in range(2))
    assert not torch.equal(y, another) and torch.equal(dx, y) and torch.equal(dresidual, x)
    torch.testing.assert_close(dbias, (dx / 2).sum(0))
    assert abs((y == 0).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(y.numel())


def test_more_elements_than_32_bits_can_count(device):
    x = torch.ones(2**21 + 3, 1024, device=device, dtype=torch.bfloat16)
    x[-5:] = 3
    y = dropout_add(x, x, 0.5)
    assert sorted(y[-5:].unique().tolist()) == [3, 9] and sorted(y[:8].unique().tolist()) == [1, 3]
