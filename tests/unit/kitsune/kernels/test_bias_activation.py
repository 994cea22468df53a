"""Activations of x + bias against their eager reference: forward, both gradients, odd shapes, strides, dtypes."""

import math

import pytest
import torch

from kitsune.kernels import bias_activation as kernel
from kitsune.kernels.bias_activation import KINDS, bias_activation, reference
from kitsune.kernels.launch import DTYPES
from kitsune.kernels.tiles import fitting, shares_of, tile_of

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def both(x, bias, kind):
    """(output, gradients of x and, if there is one, bias) by the kernel and by the reference in fp64, same inputs."""
    dy = torch.randn(x.shape, device=x.device, dtype=torch.float64).to(x.dtype)
    results = []
    for function, wide in ((bias_activation, False), (reference, True)):
        given = [one.detach().double() if wide else one.detach() for one in (x, bias) if one is not None]
        leaves = [one.requires_grad_() for one in given]
        y = function(leaves[0], None if bias is None else leaves[1], kind)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    return zip(*results, strict=True)


def check(x, bias, kind, tolerance):
    for ours, exact in both(x, bias, kind):
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_reference_does(device, dtype, kind):
    torch.manual_seed(0)
    x, bias = 3 * torch.randn(6, 100, device=device).to(dtype), torch.randn(100, device=device).to(dtype)
    check(x, bias, kind, TOLERANCES[dtype])
    check(x, None, kind, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (70,), (2, 700), (150, 17), (40, 1)])
def test_shapes_need_not_fit_the_tiles(device, dtype, shape):
    torch.manual_seed(0)
    x, bias = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    check(x, bias, "silu", TOLERANCES[dtype])
    check(x, None, "silu", TOLERANCES[dtype])


def test_results_have_the_dtypes_of_what_they_belong_to(device):
    x, bias = torch.randn(3, 8, device=device, dtype=torch.float16), torch.randn(8, device=device)
    assert [ours.dtype for ours, _ in both(x, bias, "gelu")] == [torch.float16, torch.float16, torch.float32]


def test_a_program_may_have_many_tiles_to_sum(device, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 4)
    x, bias = torch.randn(90, 70, device=device), torch.randn(70, device=device)
    assert shares_of(math.ceil(90 / tile_of(90, 70)[0]), 1, kernel.PROGRAMS) == (4, 3)
    check(x, bias, "gelu", TOLERANCES[torch.float32])


def test_x_and_bias_may_have_gaps_and_x_another_order(device):
    wide = torch.randn(4, 6, 40, device=device, dtype=torch.bfloat16)
    check(wide.transpose(0, 1)[..., 3:30], torch.randn(54, device=device)[::2], "gelu", 2**-6)


def test_a_gradient_may_be_one_number_for_all(device):
    x, bias = torch.randn(5, 9, device=device, requires_grad=True), torch.randn(9, device=device, requires_grad=True)
    bias_activation(x, bias, "relu").sum().backward()
    slope = (x + bias > 0).float().detach()
    assert torch.equal(x.grad, slope) and torch.equal(bias.grad, slope.sum(0))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, where a GPU is silent
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values_are_those_of_torch_and_nan_stays_nan(device, kind):
    x = torch.tensor([-3e4, -200.0, -20.0, -0.0, 0.0, 20.0, 200.0, 3e4, torch.nan], device=device)
    bias = torch.zeros(9, device=device)
    for ours, exact in both(x, bias, kind):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert bias_activation(x, bias, kind)[-1].isnan()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_far_out_the_slope_is_that_of_torch(device, kind):
    x = torch.tensor([[-3e38, -2e13, 2e13, 3e38]], device=device, requires_grad=True)
    bias_activation(x, None, kind).sum().backward()
    assert x.grad.tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_the_slope_of_relu_lets_no_infinity_through_where_it_is_flat(device):
    x = torch.tensor([-1.0, 0.0, 1.0], device=device, requires_grad=True)
    bias_activation(x, None, "relu").backward(torch.full((3,), torch.inf, device=device))
    assert torch.equal(x.grad, torch.tensor([0, 0, torch.inf], device=device))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_nothing_is_launched_for_nothing(device, shape):
    x = torch.ones(shape, device=device, requires_grad=True)
    bias = torch.ones(shape[-1], device=device, requires_grad=True)
    (bias_activation(x, bias, "gelu") + bias_activation(x, None, "gelu")).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_nothing_is_written_beyond_the_end(device, beyond):
    x, bias = torch.ones(9, 70, device=device), torch.ones(70, device=device)
    for given in (bias, None):
        kernel.forward(x, given, "relu")
        kernel.backward(x, x, given, "relu")
    assert len(beyond) >= 4 and all((memory == 7).all() for memory in beyond)


def test_the_same_input_gives_the_same_bits(device):
    x, bias = torch.randn(200, 33, device=device), torch.randn(33, device=device)
    first, second = (kernel.backward(x, x, bias, "gelu") for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_an_unknown_kind_is_refused_with_the_choices(device):
    with pytest.raises(ValueError, match=r"'swish' is no activation.*gelu, gelu_tanh, silu, relu"):
        bias_activation(torch.ones(2, device=device), None, "swish")


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float64, (8,)), (torch.float32, (1,)), (torch.float32, (3, 1))])
def test_what_triton_does_not_reach_is_computed_all_the_same(device, dtype, bias):
    x, bias = torch.randn(3, 8, device=device, dtype=dtype), torch.ones(bias, device=device)
    assert torch.equal(bias_activation(x, bias, "gelu"), reference(x, bias, "gelu"))


def test_tiles_are_wide_without_much_beyond_the_end():
    assert tile_of(4096, 3072) == tile_of(4096, 50257) == tile_of(4096, 200) == (4, 256)
    assert tile_of(4096, 320) == (8, 128) and tile_of(4096, 270) == (16, 64)
    assert tile_of(1, 10**10) == (1, 1024) and tile_of(10**10, 1) == (1024, 1) and tile_of(2, 10**5) == (2, 512)
    assert [fitting(heads, most=16) for heads in (1, 3, 12, 28, 32, 40, 71)] == [1, 1, 4, 16, 16, 16, 16]


def test_the_operator_is_what_torch_asks_of_one(device):
    x, bias = torch.randn(3, 5, device=device, requires_grad=True), torch.randn(5, device=device, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.forward, (x, bias, "gelu"), test_utils=checks)
    torch.library.opcheck(kernel.forward, (x, None, "silu"), test_utils=checks)
    for given in (bias, None):
        inputs = (x.detach(), x.detach(), given if given is None else given.detach(), "gelu")
        torch.library.opcheck(kernel.backward, inputs, test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    x, bias = torch.randn(3, 5, device=device), torch.randn(5, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: bias_activation(x, bias, "gelu"), fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    gradient, bias.grad = bias.grad, None
    reference(x, bias, "gelu").sum().backward()
    torch.testing.assert_close(gradient, bias.grad)
