"""BatchNorm and ReLU as Triton compiles them: layers of real models, far addresses, streams, CUDA graphs, Inductor."""

from functools import partial

import pytest
import torch

from kitsune.kernels import batch_norm_relu as kernel
from kitsune.kernels.batch_norm_relu import batch_norm_relu, reference
from tests.kernel_checks import check_current_stream, check_graph

MOMENTUM, EPS = 0.1, 1e-5
#: One rounding of the result; sums over a million elements for fp32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
LAYERS = {
    "ResNet-50's first": ((32, 64, 112, 112), True, torch.bfloat16, torch.float32),
    "ResNet-50's first, channels first": ((32, 64, 112, 112), False, torch.float32, torch.float32),
    "ResNet-50's last, channels first": ((64, 2048, 7, 7), False, torch.float16, torch.float16),
    "of no even sizes": ((37, 100, 13, 11), True, torch.float32, torch.float32),
}
FIRST = LAYERS["ResNet-50's first"]


def inputs(device, shape, last, dtype, own, seed=0):
    """x, weight, bias, running mean and variance, and a gradient: zero where fp32 may miss the side of the ReLU."""
    torch.manual_seed(seed)
    order = torch.channels_last if last else torch.contiguous_format
    x, dy = ((torch.randn(shape, device=device) + 1).to(dtype).contiguous(memory_format=order) for _ in range(2))
    weight, bias, mean = (torch.randn(shape[1], device=device) for _ in range(3))
    given = (x, weight.to(own), bias.to(own), mean, torch.rand(shape[1], device=device) + 0.5)
    for training in (True, False):
        exact = reference(*(one.double() for one in given), training, MOMENTUM, EPS, relu=False)
        dy = torch.where(exact.abs() > 1e-3, dy, 0)
    return *given, dy


def step(function, x, weight, bias, mean, variance, dy, training=True):
    """(output, running mean and variance, gradients of x, weight and bias); what is given stays."""
    leaves = [one.detach().requires_grad_() for one in (x, weight, bias)]
    running = mean.clone(), variance.clone()
    y = function(*leaves, *running, training, MOMENTUM, EPS)
    return y.detach(), *running, *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in LAYERS), ("ResNet-50's first", False)])
def test_it_computes_what_the_reference_does(device, monkeypatch, name, training):
    given = inputs(device, *LAYERS[name])
    exact = step(reference, *(one.double() for one in given), training=training)
    monkeypatch.setattr(kernel, "reference", None)
    results = step(batch_norm_relu, *given, training=training)
    for ours, wanted, like in zip(results, exact, (given[0], *given[3:5], *given[:3]), strict=True):
        assert ours.dtype == like.dtype and ours.stride() == like.stride()
        atol = TOLERANCES[like.dtype] * (wanted.abs().max().item() + 1)
        torch.testing.assert_close(ours.double(), wanted, rtol=TOLERANCES[like.dtype], atol=atol)


def test_a_mean_far_from_zero_costs_no_precision(device):
    x = torch.randn(32, 64, 112, 112, device=device) + 10_000
    mean, variance = kernel.statistics(x, None, None, MOMENTUM)
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2, 3)), rtol=5e-7, atol=0)
    torch.testing.assert_close(variance.double(), x.double().var((0, 2, 3), correction=0), rtol=5e-5, atol=0)


@pytest.mark.parametrize("shape", [(2**25 + 8, 64), (2**15 + 8, 64, 1024)], ids=["channels last", "channels first"])
def test_there_may_be_more_elements_than_an_int32_counts(device, shape):
    x, *vectors, dy = inputs(device, (8, *shape[1:]), False, torch.bfloat16, torch.float32)
    many, slopes = (torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    many[-8:], slopes[-8:] = x, dy
    wanted = step(reference, *(one.double() for one in (x, *vectors, dy)), training=False)
    ours = step(batch_norm_relu, many, *vectors, slopes, training=False)
    assert not ours[3][:-8].any()
    for one, exact in zip((ours[0][-8:], ours[3][-8:], *ours[4:]), (wanted[0], *wanted[3:]), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=2**-8, atol=2**-8)
    mean, _ = kernel.statistics(many, None, None, MOMENTUM)
    sums = x.double().sum((0, *range(2, x.dim())))
    torch.testing.assert_close(mean.double(), sums * 64 / many.numel(), rtol=1e-4, atol=0)


def test_what_is_not_a_number_is_not_cut_off(device):
    x, *given, dy = inputs(device, *FIRST)
    x[3, 5, 7, 9] = torch.nan
    y, *_, dx, _, _ = step(batch_norm_relu, x, *given, dy)
    for result in (y, dx):
        assert result[:, 5].isnan().all() and result[:, :5].isfinite().all() and result[:, 6:].isfinite().all()


def test_the_same_input_gives_the_same_bits(device):
    given = inputs(device, *FIRST)
    assert all(map(torch.equal, step(batch_norm_relu, *given), step(batch_norm_relu, *given)))


def test_it_runs_on_the_stream_that_is_current(device):
    given = inputs(device, *FIRST)
    check_current_stream(partial(step, batch_norm_relu), given)


def test_a_cuda_graph_replays_it_on_what_its_inputs_hold_then(device):
    first, second = inputs(device, *FIRST), inputs(device, *FIRST, seed=1)
    check_graph(partial(step, batch_norm_relu), first, second)


def test_inductor_keeps_it_whole(device):
    given = inputs(device, *FIRST)

    def doubled(x, *rest):
        return batch_norm_relu(x * 2, *rest)

    wanted = step(doubled, *given)
    ours = step(torch.compile(doubled, fullgraph=True), *given)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)
