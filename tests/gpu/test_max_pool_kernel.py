"""Max pooling as Triton compiles it: layers of real models, far addresses, streams, CUDA graphs, Inductor."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kitsune.kernels import max_pool as kernel
from kitsune.kernels.max_pool import max_pool, reference
from tests.kernel_checks import check_current_stream, check_graph

#: The gradient is rounded once.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
LAYERS = {
    "ResNet-50": ((16, 64, 112, 112), (3, 2, 1), torch.bfloat16),
    "ResNet-50 in fp32": ((16, 64, 112, 112), (3, 2, 1), torch.float32),
    "VGG-16": ((4, 64, 224, 224), (2, 2, 0), torch.bfloat16),
    "GoogLeNet": ((16, 192, 56, 56), (3, 2, 1), torch.float16),
    "within a block of GoogLeNet": ((16, 480, 14, 14), (3, 1, 1), torch.bfloat16),
    "of no even sizes": ((5, 37, 53, 29), ((5, 4), (3, 1), (2, 1)), torch.float32),
    "with gaps between windows": ((5, 96, 40, 30), (2, 5, 0), torch.bfloat16),
}
FIRST = LAYERS["ResNet-50"]
ORDERS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


def inputs(device, shape, window, dtype, order=torch.channels_last, seed=0):
    """x with many equal elements, as after a ReLU, and a gradient of the output."""
    torch.manual_seed(seed)
    x = torch.randn(shape, device=device).relu().to(dtype).contiguous(memory_format=order)
    return x, torch.randn_like(F.max_pool2d(x, *window))


def step(function, x, dy, window=FIRST[1]):
    """(output, gradient)."""
    x = x.detach().requires_grad_()
    y = function(x, *window)
    return y.detach(), *torch.autograd.grad(y, x, dy.to(y.dtype))


def check(x, dy, window):
    """What the kernel gives is what torch gives in fp64, laid out as torch lays it out."""
    (y, dx), (exact, dexact) = step(max_pool, x, dy, window), step(F.max_pool2d, x.double(), dy, window)
    assert y.dtype == dx.dtype == x.dtype
    assert y.stride() == F.max_pool2d(x, *window).stride() and dx.stride() == x.stride()
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=0, equal_nan=True)
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(dx.double(), dexact, rtol=tolerance, atol=tolerance * dexact.abs().max().item())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_what_torch_does(device, monkeypatch, name, order):
    shape, window, dtype = LAYERS[name]
    x, dy = inputs(device, shape, window, dtype, ORDERS[order])
    monkeypatch.setattr(kernel, "reference", None)
    check(x, dy, window)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_not_a_number_shows_and_gets_the_gradient(device, dtype, order):
    x, dy = inputs(device, (2, 64, 56, 56), FIRST[1], dtype, ORDERS[order])
    x[torch.rand(x.shape, device=device) < 0.05] = torch.nan
    check(x, dy, FIRST[1])


@pytest.mark.parametrize("order", ORDERS)
def test_of_elements_that_are_all_infinite_the_first_gets_the_gradient(device, order):
    """As torch has it channels first; channels last it gives the gradient of all such windows to one element."""
    x, dy = inputs(device, (2, 64, 56, 56), FIRST[1], torch.float32, ORDERS[order])
    x[0, 3, :30] = -torch.inf
    y, dx = step(max_pool, x, dy)
    wanted, dwanted = step(F.max_pool2d, x.contiguous(), dy)
    assert torch.equal(y, wanted)
    torch.testing.assert_close(dx, dwanted)


@pytest.mark.parametrize("order", ORDERS)
def test_there_may_be_more_elements_than_an_int32_counts(device, order):
    shape, window = (2**15 + 8, 64, 32, 32), (2, 2, 0)
    x, dy = inputs(device, (8, *shape[1:]), window, torch.bfloat16, ORDERS[order])
    many = torch.zeros(shape, device=device, dtype=x.dtype).contiguous(memory_format=ORDERS[order])
    slopes = torch.zeros_like(F.max_pool2d(many, *window))
    many[-8:], slopes[-8:] = x, dy
    (y, dx), (wanted, dwanted) = step(max_pool, many, slopes, window), step(max_pool, x, dy, window)
    assert torch.equal(y[-8:], wanted) and torch.equal(dx[-8:], dwanted)
    assert not y[:-8].any() and not dx[:-8].any()


def test_the_same_input_gives_the_same_bits(device):
    given = inputs(device, *FIRST)
    assert all(map(torch.equal, step(max_pool, *given), step(max_pool, *given)))


def test_it_runs_on_the_stream_that_is_current(device):
    check_current_stream(partial(step, max_pool), inputs(device, *FIRST))


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    first, second = inputs(device, *FIRST), inputs(device, *FIRST, seed=1)
    check_graph(partial(step, max_pool), first, second)


@pytest.mark.parametrize("order", ORDERS)
def test_inductor_keeps_it_whole(device, order):
    x, dy = inputs(device, *FIRST, ORDERS[order])
    wanted = step(lambda x, *window: reference(x * 2, *window), x, dy)
    ours = step(torch.compile(lambda x, *window: max_pool(x * 2, *window), fullgraph=True), x, dy)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)
