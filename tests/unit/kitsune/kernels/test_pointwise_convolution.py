"""Pointwise convolutions with statistics against torch's: odd sizes, layouts, means far from zero, gradients."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from kitsune.fusion import calls
from kitsune.kernels import pointwise_convolution as kernel
from kitsune.kernels.launch import IS_INTERPRETED
from kitsune.kernels.pointwise_convolution import is_offered, pointwise_convolution, reference
from kitsune.kernels.products import Tiling

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tiles of the GPU are tested in tests/gpu")
SMALL = {"high": 32, "stages": 2, "warps": 4}
TILINGS = {
    "NARROW": Tiling(**SMALL, wide=16, deep=16, pieces=2, programs=3),
    "WIDE": Tiling(**SMALL, wide=32, deep=16, pieces=4, programs=5),
}
#: (images, channels, height, width), channels of the result, the tiling that is meant for it.
LAYERS = {
    "one product a tile": ((3, 16, 5, 7), 16, "NARROW"),
    "two products a tile": ((2, 24, 4, 9), 8, "NARROW"),
    "to more channels": ((3, 8, 5, 7), 40, "NARROW"),
    "long, to more channels": ((1, 32, 8, 8), 72, "WIDE"),
    "long, to more channels, ragged": ((2, 40, 3, 7), 48, "WIDE"),
}
RAGGED = "to more channels"  # nine positions in its last tile
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles and programs in tiny shapes."""
    for name, tiling in TILINGS.items():
        monkeypatch.setattr(kernel, name, tiling)


@pytest.fixture
def no_way_out(monkeypatch):
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, name=RAGGED, dtype=torch.float32):
    """(x, weight), which want gradients."""
    torch.manual_seed(0)
    shape, out, _ = LAYERS[name]
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(out, shape[1], 1, 1, device=device) / shape[1] ** 0.5).to(dtype)
    return x.requires_grad_(), weight.requires_grad_()


def results_of(function, x, weight, dtype=None):
    """(y, mean, variance, gradient of x, gradient of the weight), with a slope for each of the first three."""
    leaves = [one.detach().to(dtype or one.dtype).requires_grad_() for one in (x, weight)]
    results = function(*leaves)
    slopes = [torch.linspace(-1, 2, one.numel(), dtype=torch.float64).view_as(one).sin().to(one) for one in results]
    return [*(one.detach() for one in results), *torch.autograd.grad(results, leaves, slopes)]


def error(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_torchs_convolution_with_its_statistics(no_way_out, device, name, dtype):
    x, weight = draw(device, name, dtype)
    assert is_offered(x, weight)
    assert kernel.tiling_of(x.shape[1], len(weight)) is TILINGS[LAYERS[name][-1]]
    found, exact = results_of(pointwise_convolution, x, weight), results_of(reference, x, weight, torch.float64)
    for one, other, kind in zip(found, exact, (dtype, torch.float32, torch.float32, dtype, dtype), strict=True):
        assert (one.dtype, one.shape) == (kind, other.shape)
        assert error(one, other) < TOLERANCES[dtype]
    assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", LAYERS)
def test_statistics_are_those_of_the_rounded_result(device, name):
    y, mean, variance = pointwise_convolution(*draw(device, name, torch.float16))
    exact = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    for one, other in zip((variance, mean), exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("first", [0.0, 300.0])
def test_a_mean_far_from_zero_takes_nothing_from_the_variance(device, first):
    """The squares' mean less the mean's square would lose it. In the second case the first tile lies apart."""
    x, weight = (one.detach() for one in draw(device))
    x[:, 0], weight[:, 0] = 1.0, 1e3
    rows = kernel.rows_of(x)
    rows[:32, 0] += first
    y, mean, variance = pointwise_convolution(x, weight)
    exact = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    assert (y.square().mean((0, 2, 3)) - y.mean((0, 2, 3)).square() - exact[0]).abs().max() > 1e-3
    torch.testing.assert_close(variance.double(), exact[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_any_of_the_results_may_have_a_gradient(no_way_out, device, used):
    x, weight = draw(device)
    ours, exact = (
        results_of(lambda *given, of=function: [of(*given)[at] for at in used], x, weight, dtype)
        for function, dtype in ((pointwise_convolution, None), (reference, torch.float64))
    )
    for one, other in zip(ours, exact, strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_what_wants_a_gradient_gets_one(device, wanted):
    given = [one.detach().requires_grad_(at == wanted) for at, one in enumerate(draw(device))]
    y, mean, variance = pointwise_convolution(*given)
    (y.square().sum() + mean.sum() + variance.square().sum()).backward()
    (exact,) = torch.autograd.grad(
        sum(one.square().sum() if at != 1 else one.sum() for at, one in enumerate(reference(*given))), given[wanted]
    )
    assert given[1 - wanted].grad is None
    torch.testing.assert_close(given[wanted].grad, exact, rtol=1e-4, atol=1e-5)


def test_a_gradient_in_another_layout_and_a_weight_that_is_channels_last(no_way_out, device):
    x, weight = draw(device)
    turned = weight.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    slopes = torch.randn_like(reference(x, weight)[0]).contiguous()
    found = torch.autograd.grad(pointwise_convolution(x, turned)[0], (x, turned), slopes)
    for one, other in zip(found, torch.autograd.grad(reference(x, weight)[0], (x, weight), slopes), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_not_a_number_shows_in_its_place_and_in_all_statistics(device):
    x, weight = (one.detach() for one in draw(device))
    x[1, 0, 2, 3] = torch.nan
    y, mean, variance = pointwise_convolution(x, weight)
    assert torch.equal(y.isnan(), F.conv2d(x, weight).isnan())
    assert mean.isnan().all() and variance.isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: (x.contiguous(), weight),
        lambda x, weight: (x.double(), weight.double()),
        lambda x, weight: (x[:, :6].contiguous(memory_format=torch.channels_last), weight[:, :6]),
        lambda x, weight: (x, weight[:7]),
        lambda x, weight: (x, weight.expand(-1, -1, 2, 3).contiguous()),
    ],
    ids=["channels first", "fp64", "rows of 24 bytes", "results of 28 bytes", "larger windows"],
)
def test_what_the_kernels_do_not_support_is_torchs(device, change):
    given = change(*draw(device))
    assert not is_offered(*given)
    for one, other in zip(pointwise_convolution(*given), reference(*given), strict=True):
        assert torch.equal(one, other)


def test_no_images_are_torchs(device):
    x, weight = draw(device)
    assert not is_offered(x[:0], weight)


def test_images_of_two_dtypes_raise_what_torch_raises(device):
    x, weight = draw(device)
    with pytest.raises(RuntimeError, match="type"):
        pointwise_convolution(x.half(), weight)


def test_nothing_is_written_beyond_the_end(device, monkeypatch):
    x, weight = (one.detach() for one in draw(device))
    found, new_empty = [], torch.Tensor.new_empty

    def room(like, *shape, **given):
        if shape == (0,):  # Triton's own
            return new_empty(like, *shape, **given)
        size = torch.Size(shape).numel()
        memory = torch.full((size + 500,), 7.0, device=like.device)
        found.append(memory[size:])
        return memory[:size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", room)
    pointwise_convolution(x, weight)
    assert len(found) == 3 and all((memory == 7).all() for memory in found)


def test_the_same_input_gives_the_same_bits(device):
    given = draw(device)
    assert all(map(torch.equal, results_of(pointwise_convolution, *given), results_of(pointwise_convolution, *given)))


def test_the_operator_is_what_torch_asks_of_it(device):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.forward, draw(device), test_utils=checks)


# With the batch norm after it -----------------------------------------------------------------------------------------


def draw_norm(device, dtype=torch.float32):
    """(x, weight in fp32, gain, bias), (running mean, running variance)."""
    x, weight = draw(device, dtype=dtype)
    own = [torch.rand(len(weight), device=device).requires_grad_() for _ in range(2)]
    return [x, weight.detach().float().requires_grad_(), *own], [torch.rand(len(weight), device=device) for _ in "mv"]


def torchs(x, weight, gain, bias, mean, variance, momentum=0.3, eps=1e-3):
    return F.batch_norm(F.conv2d(x, weight), mean, variance, gain, bias, True, momentum, eps)


def ours(x, weight, gain, bias, mean, variance, momentum=0.3, eps=1e-3):
    return calls.pointwise_convolution(x, weight, gain, bias, mean, variance, momentum, eps, x.dtype)


def trained(function, leaves, running, dtype=None):
    """(the result, gradients, running statistics)."""
    leaves = [one.detach().to(dtype or one.dtype).requires_grad_() for one in leaves]
    running = [one.to(dtype or one.dtype, copy=True) for one in running]
    y = torch.relu(function(*leaves, *running))
    slopes = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y).sin().to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, slopes), *running]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_with_its_batch_norm_it_trains_as_torch_does(no_way_out, device, dtype):
    leaves, running = draw_norm(device, dtype)
    found, exact = trained(ours, leaves, running), trained(torchs, leaves, running, torch.float64)
    kinds = dtype, dtype, *[torch.float32] * 5
    for one, other, kind in zip(found, exact, kinds, strict=True):
        assert one.dtype == kind
        assert error(one, other) < 2 * TOLERANCES[dtype]


def test_second_derivatives_are_torchs(device):
    found = []
    for function, dtype in ((ours, torch.float32), (torchs, torch.float64)):
        leaves, running = draw_norm(device)
        leaves = [one.detach().to(dtype).requires_grad_() for one in leaves]
        y = function(*leaves, *(one.to(dtype) for one in running)).sin()
        first = torch.autograd.grad(y.sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
    for one, other in zip(*found, strict=True):
        assert error(one, other) < 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_compiled_it_is_one_operator_and_two_sums_over_positions(no_way_out, device):
    graphs = []

    def kept(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    leaves, running = draw_norm(device)
    wanted = trained(ours, leaves, running)
    compiled = torch.compile(ours, fullgraph=True, backend=aot_autograd(fw_compiler=kept))
    for one, other in zip(trained(compiled, leaves, running), wanted, strict=True):
        torch.testing.assert_close(one, other)
    forward, backward = graphs
    assert [name for name in forward if "kitsune" in name] == ["kitsune.pointwise_convolution.default"]
    assert backward.count("aten.sum.dim_IntList") == 2 and "aten.clone.default" not in backward
    assert backward.count("aten.convolution_backward.default") == 1
