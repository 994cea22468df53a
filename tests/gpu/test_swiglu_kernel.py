"""silu(gate) * up on a GPU: real shapes, streams, CUDA graphs, torch.compile, more than 2**31 elements."""

import pytest
import torch

from kitsune.kernels.launch import DTYPES
from kitsune.kernels.swiglu import reference, swiglu

#: One unit in the last place, and in fp32 what Triton's exp and division leave of it.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def gradients(function, gate, up, dy):
    """(output, gradient of gate, gradient of up)."""
    leaves = [one.detach().requires_grad_() for one in (gate, up)]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def check(gate, up, dy):
    tolerance = TOLERANCES[gate.dtype]
    ours, exact = gradients(swiglu, gate, up, dy), gradients(reference, gate.double(), up.double(), dy)
    for one, other in zip(ours, exact, strict=True):
        scale = other.abs().max().item() + 1
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2048, 11008), (4096, 14336)])
def test_shapes_of_llama(device, dtype, shape):
    check(*torch.randn(3, *shape, device=device).to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (7, 5461), (100003, 3)])
def test_shapes_that_do_not_fit_the_tiles(device, shape):
    check(*torch.randn(3, *shape, device=device).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5632, 1001])
def test_the_halves_of_a_projection_are_read_where_they_lie(device, dtype, columns):
    gate, up = torch.randn(2, 1024, 2 * columns, device=device).to(dtype).chunk(2, -1)
    check(gate, up, torch.randn(2, 1024, columns, device=device).to(dtype))


def test_the_same_input_gives_the_same_bits(device):
    inputs = torch.randn(3, 4096, 11008, device=device, dtype=torch.bfloat16)
    assert all(map(torch.equal, *(gradients(swiglu, *inputs) for _ in range(2))))


def test_it_is_launched_on_the_current_stream(device):
    gate, up, later = (
        torch.zeros(512, 768, device=device),
        torch.ones(512, 768, device=device),
        torch.ones(1).to(device),
    )
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        gate += later
        y = swiglu(gate, up)
    torch.cuda.current_stream(device).wait_stream(side)
    assert (y > 0.7).all()


def test_it_is_captured_and_replayed_with_other_values(device):
    inputs = torch.randn(3, 2048, 5632, device=device, dtype=torch.bfloat16)
    gradients(swiglu, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(swiglu, *inputs)
    inputs.copy_(torch.randn_like(inputs))
    graph.replay()
    assert all(map(torch.equal, captured, gradients(swiglu, *inputs)))


def test_a_compiled_model_has_the_gradients_of_an_eager_one(device):
    x, dy = torch.randn(512, 2048, device=device), torch.randn(512, 1024, device=device)

    def function(x):
        return swiglu(*(x * 2).chunk(2, -1))

    results = []
    for one in (torch.compile(function, fullgraph=True), function):
        leaf = x.detach().requires_grad_()
        y = one(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    assert all(map(torch.equal, *results))


def test_more_elements_than_32_bits_can_count(device):
    gate = torch.ones(2**21 + 3, 1024, device=device, dtype=torch.bfloat16)
    gate[-5:] = torch.randn(5, 1024, device=device)
    y = swiglu(gate, gate)
    torch.testing.assert_close(y[-8:], swiglu(gate[-8:].clone(), gate[-8:].clone()))
    torch.testing.assert_close(y[:8], swiglu(gate[:8].clone(), gate[:8].clone()))
