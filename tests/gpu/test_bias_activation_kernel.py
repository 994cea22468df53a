"""Activations of x + bias on a GPU: real shapes, streams, CUDA graphs, torch.compile, more than 2**31 elements."""

import pytest
import torch

from kitsune.kernels.bias_activation import KINDS, bias_activation, reference
from kitsune.kernels.launch import DTYPES

#: One unit in the last place, and in fp32 what Triton's exp and division leave of it.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def gradients(function, x, bias, kind, dy):
    """(output, gradient of x, gradient of bias if there is one)."""
    leaves = [one.detach().requires_grad_() for one in (x, bias) if one is not None]
    y = function(leaves[0], None if bias is None else leaves[1], kind)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def check(device, shape, dtype, kind, with_bias=True):
    x, dy = 2 * torch.randn(2, *shape, device=device).to(dtype)
    bias = torch.randn(shape[-1], device=device).to(dtype) if with_bias else None
    wide = [None if one is None else one.double() for one in (x, bias)]
    ours, exact = gradients(bias_activation, x, bias, kind, dy), gradients(reference, *wide, kind, dy)
    for one, other in zip(ours, exact, strict=True):
        scale = other.abs().max().item() + 1
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_reference_does(device, kind):
    check(device, (16, 128, 3072), torch.bfloat16, kind)  # BERT base
    check(device, (16, 128, 3072), torch.bfloat16, kind, with_bias=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 1024, 3072), (4096, 11008)])
def test_shapes_of_gpt2_and_llama(device, dtype, shape):
    check(device, shape, dtype, "gelu")


@pytest.mark.parametrize("shape", [(1, 1), (7, 50257), (100003, 3), (33, 1000)])
def test_shapes_that_do_not_fit_the_tiles(device, shape):
    check(device, shape, torch.bfloat16, "gelu")


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(device, kind):
    x = torch.tensor([torch.nan, 1.0], device=device)
    assert bias_activation(x, None, kind).isnan().tolist() == [True, False]


def test_the_same_input_gives_the_same_bits(device):
    x, dy = torch.randn(2, 4096, 3072, device=device, dtype=torch.bfloat16)
    bias = torch.randn(3072, device=device)
    first, second = (gradients(bias_activation, x, bias, "gelu", dy) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_it_is_launched_on_the_current_stream(device):
    x, bias, later = torch.zeros(512, 768, device=device), torch.ones(768, device=device), torch.ones(1, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x += later
        y = bias_activation(x, bias, "relu")
    torch.cuda.current_stream(device).wait_stream(side)
    assert (y == 2).all()


def test_it_is_captured_and_replayed_with_other_values(device):
    x, dy = torch.randn(2, 2048, 768, device=device, dtype=torch.bfloat16)
    bias = torch.randn(768, device=device)
    gradients(bias_activation, x, bias, "gelu", dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(bias_activation, x, bias, "gelu", dy)
    for tensor in (x, dy, bias):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(map(torch.equal, captured, gradients(bias_activation, x, bias, "gelu", dy)))


def test_a_compiled_model_has_the_gradients_of_an_eager_one(device):
    x, dy = torch.randn(2, 512, 768, device=device, dtype=torch.bfloat16)
    bias = torch.randn(768, device=device, dtype=torch.bfloat16)

    def function(x, bias, kind):
        return bias_activation(x * 2, bias, kind)

    compiled = torch.compile(function, fullgraph=True)
    assert all(map(torch.equal, gradients(compiled, x, bias, "gelu", dy), gradients(function, x, bias, "gelu", dy)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_more_elements_than_32_bits_can_count(device, with_bias):
    x = torch.ones(2**21 + 3, 1024, device=device, dtype=torch.bfloat16)
    bias = torch.randn(1024, device=device) if with_bias else None
    x[-5:] = torch.randn(5, 1024, device=device)
    y = bias_activation(x, bias, "silu")
    torch.testing.assert_close(y[-8:], bias_activation(x[-8:].clone(), bias, "silu"))
    torch.testing.assert_close(y[:8], bias_activation(x[:8].clone(), bias, "silu"))
