"""Pointwise convolutions with statistics as Triton compiles them: layers of ResNet, streams, CUDA graphs, Inductor."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.fusion import FusionConfig, FusionEngine, Pattern, calls, convolutions
from kitsune.fusion.patterns import HALF
from kitsune.kernels import pointwise_convolution as kernel
from kitsune.kernels.pointwise_convolution import pointwise_convolution, reference
from kitsune.kernels.products import HOPPER
from tests.kernel_checks import check_current_stream, check_graph

#: (images, channels, side), channels of the result
LAYERS = {
    "narrow": ((8, 64, 56), 64),
    "shallow": ((8, 64, 56), 256),
    "narrow and deep": ((8, 256, 56), 64),
    "deep": ((8, 512, 28), 128),
    "middle": ((8, 128, 28), 512),
    "stage 3": ((8, 256, 14), 1024),
    "stage 4, ragged": ((5, 512, 7), 2048),
    "many tiles": ((48, 64, 80), 256),
    "no whole tiles": ((3, 40, 19), 72),
    "few positions": ((1, 72, 3), 24),
}
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (HOPPER, 0),
    reason="the kernels need the tensor memory accelerator",
)


@pytest.fixture
def no_way_out(monkeypatch):
    """The reference is out of reach: what is computed is computed by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_float32_matmul_precision(before[1])


def draw(device, name="shallow", dtype=torch.bfloat16, seed=0):
    """(x, weight, gradient of the result)."""
    (images, channels, side), out = LAYERS[name]
    torch.manual_seed(seed)
    drawn = [
        torch.randn(images, channels, side, side, device=device),
        torch.randn(out, channels, 1, 1, device=device) / channels**0.5,
        torch.randn(images, out, side, side, device=device),
    ]
    return [one.to(dtype).contiguous(memory_format=torch.channels_last) for one in drawn]


def step_of(function):
    """A step gives (y, mean, variance, gradient of x, gradient of the weight), with slopes for the first three."""

    def step(x, weight, dy):
        x, weight = (one.detach().requires_grad_() for one in (x, weight))
        y, mean, variance = function(x, weight)
        # As large as those of a batch norm: each position gets a share of a channel's slope.
        slopes = dy.to(y.dtype), dy.float().sum((0, 2, 3)).to(mean.dtype), dy.float().sum((0, 2, 3)).to(mean.dtype)
        return *(one.detach() for one in (y, mean, variance)), *torch.autograd.grad(
            (y, mean, variance), (x, weight), slopes
        )

    return step


ours = step_of(pointwise_convolution)


def error(one, right):
    return ((one.double() - right.double()).norm() / right.double().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_what_torch_does(device, monkeypatch, name, dtype):
    x, weight, dy = draw(device, name, dtype)
    exact = step_of(reference)(x.float(), weight.float(), dy)
    monkeypatch.setattr(kernel, "reference", None)
    found = ours(x, weight, dy)
    for at, kind in enumerate((dtype, torch.float32, torch.float32, dtype, dtype)):
        assert (found[at].dtype, found[at].shape) == (kind, exact[at].shape)
        # Means near zero are sums of roundings: those of the rounded result are compared below. Of many positions, the
        # share of each in a channel's slope is below the rounding of its gradient, and the weight's gradient misses it.
        most = TOLERANCES[dtype] * (2 if at == 4 else 1)
        assert at == 1 or error(found[at], exact[at]) < most
    y, mean, variance, *_ = found
    exact = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_input_gives_the_same_bits(device, no_way_out, name):
    x, weight, _ = draw(device, name)
    first = pointwise_convolution(x, weight)
    for _ in range(5):
        assert all(map(torch.equal, pointwise_convolution(x, weight), first))


def test_what_is_beyond_the_last_position_is_left_alone(device, no_way_out):
    x, weight, _ = draw(device, "stage 4, ragged")
    y, *_ = pointwise_convolution(x, weight)
    twice, *_ = pointwise_convolution(torch.cat((x, x)), weight)
    assert torch.equal(twice[:5], y) and torch.equal(twice[5:], y)


def test_a_mean_far_from_zero_takes_nothing_from_the_variance(device, no_way_out):
    x, weight, _ = draw(device, "shallow", torch.float16)
    x[:, 0], weight[:, 0] = 1.0, 500.0
    y, mean, variance = pointwise_convolution(x, weight)
    exact = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=1e-6, atol=0)


def test_it_runs_on_the_stream_that_is_current(device, no_way_out):
    check_current_stream(ours, draw(device))


def test_a_graph_replays_it(device, no_way_out):
    check_graph(ours, draw(device), draw(device, seed=1))


def norm_of(function):
    """A step gives (the result after batch norm, residual and ReLU, gradients, running statistics)."""

    def step(x, weight, residual, gain, bias, mean, variance, dy):
        leaves = [one.detach().requires_grad_() for one in (x, weight, residual, gain, bias)]
        running = [mean.clone(), variance.clone()]
        y = function(*leaves, *running)
        return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype)), *running

    return step


def torchs(x, weight, residual, gain, bias, mean, variance):
    y = F.conv2d(x, weight.to(x.dtype))
    return torch.relu(F.batch_norm(y, mean, variance, gain, bias, True, 0.1, 1e-5) + residual)


def fused(x, weight, residual, gain, bias, mean, variance):
    y = calls.pointwise_convolution(x, weight, gain, bias, mean, variance, 0.1, 1e-5, x.dtype)
    return torch.relu(y + residual)


def draw_norm(device, dtype=torch.bfloat16, seed=0, name="shallow"):
    x, weight, dy = draw(device, name, dtype, seed)
    residual = torch.randn_like(dy)
    vectors = [torch.rand(len(weight), device=device) for _ in range(4)]
    return [x, weight.float(), residual, *vectors, dy]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["shallow", "narrow and deep", "stage 4, ragged"])
def test_compiled_with_its_batch_norm_it_is_as_near_to_the_truth_as_torch(device, monkeypatch, name, dtype):
    given = draw_norm(device, dtype, name=name)
    exact, theirs = norm_of(torchs)(*(one.float() for one in given)), norm_of(torch.compile(torchs))(*given)
    monkeypatch.setattr(kernel, "reference", None)
    found = norm_of(torch.compile(fused, fullgraph=True))(*given)
    for one, other, right in zip(found, theirs, exact, strict=True):
        assert one.dtype == other.dtype
        assert error(one, right) < 1.2 * error(other, right) + TOLERANCES[dtype] / 10


@pytest.mark.timeout(300)
def test_a_graph_replays_it_with_its_batch_norm_as_compiled(device, no_way_out):
    step = norm_of(torch.compile(fused, fullgraph=True))
    step(*draw_norm(device))
    check_graph(step, draw_norm(device), draw_norm(device, seed=1))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_it_is_found_in_a_bottleneck_under_autocast_and_trains_as_without(device, compiler):
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
        *(nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256)),
    ).to(device, memory_format=torch.channels_last)
    model, (x, _, dy) = copy.deepcopy(plain), draw(device, dtype=torch.float32)
    engine = FusionEngine(FusionConfig(enable_reduction=False), compiler=compiler, clock=lambda *_: (2.0, 1.0))
    engine.register_pattern(Pattern("pointwise_convolution", "matmul", convolutions.pointwise_convolution, HALF))
    found = []
    for one, function in ((plain, plain), (model, engine.fuse(model))):
        with torch.autocast("cuda", torch.bfloat16):
            for _ in range(3):
                y = function(x)
        found.append([y.detach(), *torch.autograd.grad(y, [*one.parameters()], dy.to(y.dtype)), *one.buffers()])
    assert engine.get_fusion_stats().matches == {"pointwise_convolution": 2}
    for one, other in zip(*reversed(found), strict=True):
        assert one.dtype == other.dtype
        assert error(one, other) < 5e-2
