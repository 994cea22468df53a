"""Rotary embedding on a GPU: heads of real models, layouts, streams, CUDA graphs, torch.compile, large tensors."""

import pytest
import torch

from kitsune.kernels.launch import DTYPES
from kitsune.kernels.rope import reference, rope

#: One unit in the last place.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def angles(*shape, device, dtype=torch.float32):
    """(cos, sin) of random angles."""
    angle = torch.rand(shape, device=device) * 6.28
    return angle.cos().to(dtype), angle.sin().to(dtype)


def gradients(function, x, dy):
    """(output, gradient of x)."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), *torch.autograd.grad(y, leaf, dy.to(y.dtype))


def check(x, cos, sin, interleaved):
    dy, tolerance = torch.randn(x.shape, device=x.device).to(x.dtype), TOLERANCES[x.dtype]
    ours = gradients(lambda x: rope(x, cos, sin, interleaved), x, dy)
    exact = gradients(lambda x: reference(x, cos, sin, interleaved), x.double(), dy)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 2048, 32, 128),  # Llama 7B
        (2, 2048, 8, 128),  # the keys of Llama 3 8B
        (4, 1000, 12, 64),  # as many heads as GPT-2 small
        (2, 512, 32, 80),  # StableLM 3B
        (1, 77, 71, 64),  # Falcon 7B
        (1, 1, 1, 2),
    ],
)
def test_heads_of_models_in_both_layouts(device, shape, interleaved):
    x, (cos, sin) = torch.randn(shape, device=device).bfloat16(), angles(shape[1], shape[3] // 2, device=device)
    check(x.transpose(1, 2), cos, sin, interleaved)
    check(x.transpose(1, 2).contiguous(), cos, sin, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(device, dtype, interleaved):
    x = torch.randn(2, 1024, 32, 128, device=device).to(dtype).transpose(1, 2)
    check(x, *angles(1024, 64, device=device, dtype=dtype), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_within_one_projection_and_the_angles_of_hugging_face(device, interleaved):
    packed = torch.randn(2, 512, 3 * 4096, device=device, dtype=torch.bfloat16)
    x = packed[..., :4096].view(2, 512, 32, 128).transpose(1, 2)
    cos, sin = angles(2, 512, 64, device=device, dtype=torch.bfloat16)
    check(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), interleaved)
    assert rope(x, cos, sin, interleaved).transpose(1, 2).is_contiguous()


def test_the_same_input_gives_the_same_bits(device):
    x, (cos, sin) = torch.randn(2, 32, 2048, 128, device=device), angles(2048, 64, device=device)
    assert torch.equal(*(rope(x, cos, sin) for _ in range(2)))


def test_it_is_launched_on_the_current_stream(device):
    x, later = torch.zeros(1, 8, 512, 64, device=device), torch.ones(1, device=device)
    cos, sin = torch.zeros(512, 32, device=device), torch.ones(512, 32, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x += later
        y = rope(x, cos, sin)
    torch.cuda.current_stream(device).wait_stream(side)
    assert (y[..., :32] == -1).all() and (y[..., 32:] == 1).all()


def test_it_is_captured_and_replayed_with_other_values(device):
    x, dy = torch.randn(2, 2, 1024, 16, 64, device=device, dtype=torch.bfloat16).transpose(2, 3)
    cos, sin = angles(1024, 32, device=device)
    gradients(lambda x: rope(x, cos, sin), x, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(lambda x: rope(x, cos, sin), x, dy)
    for tensor in (x, dy, cos, sin):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(map(torch.equal, captured, gradients(lambda x: rope(x, cos, sin), x, dy)))


def test_a_compiled_model_has_the_gradients_of_an_eager_one(device):
    x, (cos, sin) = torch.randn(2, 256, 8 * 64, device=device), angles(256, 32, device=device)

    def function(x):
        turned = rope((x * 2).view(2, 256, 8, 64).transpose(1, 2), cos, sin)
        return turned.transpose(1, 2).reshape(2, 256, 8 * 64)

    dy = torch.randn_like(x)
    assert all(map(torch.equal, gradients(torch.compile(function, fullgraph=True), x, dy), gradients(function, x, dy)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_more_elements_than_32_bits_can_count(device, interleaved):
    tokens = 2**18 + 3
    x, (cos, sin) = (
        torch.zeros(2, 32, tokens, 128, device=device, dtype=torch.bfloat16),
        angles(tokens, 64, device=device),
    )
    x[1, -1, -8:] = torch.randn(8, 128, device=device)
    y = rope(x, cos, sin, interleaved)
    expected = rope(x[1:, -1:, -8:].clone(), cos[-8:], sin[-8:], interleaved)
    torch.testing.assert_close(y[1:, -1:, -8:], expected)
    assert not y[0].any()
