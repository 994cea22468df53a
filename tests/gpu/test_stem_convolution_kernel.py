"""The first convolution of a network as Triton compiles it: layers of real models, streams, CUDA graphs, Inductor."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import stem_convolution as kernel
from kitsune.kernels.stem_convolution import stem_convolution
from tests.kernel_checks import check_current_stream, check_graph

TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
#: (images, channels, side), (out, side of the kernel, stride, padding)
LAYERS = {
    "ResNet-50": ((16, 3, 224), (64, 7, 2, 3)),
    "VGG-16": ((4, 3, 224), (64, 3, 1, 1)),
    "EfficientNet": ((8, 3, 224), (32, 3, 2, 1)),
    "one channel, stride of two": ((8, 1, 60), (24, 5, 2, 2)),
    "stride of one": ((2, 3, 96), (64, 7, 1, 3)),
    "LeNet": ((32, 1, 28), (6, 5, 1, 2)),
    "four channels, many results": ((3, 4, 61), (200, 5, 3, 0)),
}


def inputs(device, name="ResNet-50", dtype=torch.bfloat16, seed=0):
    """(x, weight, gradient of the result)."""
    (images, channels, side), (out, size, stride, padding) = LAYERS[name]
    torch.manual_seed(seed)
    x = torch.randn(images, channels, side, side, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(out, channels, size, size, device=device).to(dtype)
    return x, weight, torch.randn_like(F.conv2d(x, weight, None, stride, padding))


def step(function, name, x, weight, dy):
    """(result, gradient of the weight)."""
    *_, stride, padding = LAYERS[name][1]
    weight = weight.detach().requires_grad_()
    y = function(x, weight, stride=(stride, stride), padding=(padding, padding))
    return y.detach(), *torch.autograd.grad(y, weight, dy.to(y.dtype))


ours = partial(step, stem_convolution, "ResNet-50")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_what_torch_does(device, monkeypatch, name, dtype):
    x, weight, dy = inputs(device, name, dtype)
    plain = partial(F.conv2d, bias=None)
    exact = step(plain, name, x.double(), weight.double(), dy)
    theirs = step(plain, name, x, weight, dy)
    monkeypatch.setattr(kernel.F, "conv2d", None)
    for one, other, right in zip(step(stem_convolution, name, x, weight, dy), theirs, exact, strict=True):
        assert one.dtype == dtype
        assert error(one, right) < max(1.2 * error(other, right), TOLERANCES[dtype] / 4)


def error(one, right):
    return ((one.double() - right).norm() / right.norm()).item()


def test_the_same_input_gives_the_same_bits(device):
    given = inputs(device)
    assert all(map(torch.equal, ours(*given), ours(*given)))


def test_it_runs_on_the_stream_that_is_current(device):
    check_current_stream(ours, inputs(device))


def test_a_graph_replays_it(device):
    check_graph(ours, inputs(device), inputs(device, seed=1))


@pytest.mark.timeout(300)
def test_inductor_compiles_what_is_around_it(device):
    x, weight, dy = inputs(device)

    def layer(x, weight):
        return torch.relu(stem_convolution(x, weight, (2, 2), (3, 3)) * 2)

    found = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        own = weight.clone().requires_grad_()
        y = function(x, own)
        found.append((y.detach(), *torch.autograd.grad(y, own, dy)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
