"""BatchNorm and ReLU against their eager reference: memory formats, statistics, gradients, dtypes, torch.compile."""

import pytest
import torch

from kitsune.kernels import batch_norm_relu as kernel
from kitsune.kernels.batch_norm_relu import batch_norm_relu, reference
from kitsune.kernels.launch import DTYPES

MOMENTUM, EPS = 0.1, 1e-5
#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def vectors(channels, device, dtype=torch.float32):
    """(weight, bias, running mean, running variance)."""
    weight, bias, mean = (torch.randn(channels, device=device) for _ in range(3))
    return weight.to(dtype), bias.to(dtype), mean, torch.rand(channels, device=device) + 0.5


def results(function, x, given, dy, training, relu):
    """(output, gradients of x, weight and bias, moved running mean and variance) of copies of what is given."""
    x, weight, bias, mean, variance = (one.detach().clone(memory_format=torch.preserve_format) for one in (x, *given))
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    y = function(*leaves, mean, variance, training, MOMENTUM, EPS, relu)
    y.backward(dy.to(y.dtype))
    return y.detach(), *(leaf.grad for leaf in leaves), mean, variance


def both(x, given, training=True, relu=True):
    """What the kernel and the reference in fp64 give for the same inputs."""
    dy = torch.randn(x.shape, device=x.device, dtype=torch.float64).to(x.dtype)
    exact = results(reference, x.double(), [one.double() for one in given], dy, training, relu)
    return zip(results(batch_norm_relu, x, given, dy, training, relu), exact, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "last", "training"),
    [
        ((4, 3, 5, 7), False, True),
        ((4, 3, 5, 7), True, True),
        ((2, 3, 5), True, False),
        ((1, 1, 1100), False, True),
        ((2, 70, 1, 1), False, True),
        ((2, 1, 2, 2, 3), False, True),
        ((300, 5), False, True),
    ],
)
def test_it_computes_what_the_reference_does(device, shape, last, training, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype)
    for ours, exact in both(channels_last(x) if last else x, vectors(shape[1], device, dtype), training):
        tolerance = TOLERANCES[dtype] if ours.dtype == dtype else TOLERANCES[torch.float32]
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("training", [True, False])
def test_the_relu_can_be_left_out(device, training):
    torch.manual_seed(0)
    x, given = torch.randn(3, 4, 6, device=device), vectors(4, device)
    for ours, exact in both(x, given, training, relu=False):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    assert (batch_norm_relu(x, *given, training, MOMENTUM, EPS, relu=False) < 0).any()


@pytest.mark.parametrize("last", [True, False])
def test_programs_may_go_over_many_tiles(device, monkeypatch, last):
    monkeypatch.setattr(kernel, "TILE", 64)
    monkeypatch.setattr(kernel, "WIDEST_FIRST", 16)
    monkeypatch.setattr(kernel, "PROGRAMS", 8)
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5, 4, device=device)
    for ours, exact in both(channels_last(x) if last else x, vectors(2, device)):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("programs", [1, 512])
def test_a_mean_far_from_zero_costs_no_precision(device, monkeypatch, last, programs):
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    torch.manual_seed(0)
    x = torch.randn(12, 2, 500, device=device) + 30_000
    x[0, 0] -= 29_000  # the first tile says little about the others
    mean, variance = kernel.statistics(channels_last(x) if last else x, None, None, MOMENTUM)
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2)), rtol=5e-7, atol=0)
    torch.testing.assert_close(variance.double(), x.double().var((0, 2), correction=0), rtol=5e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_running_statistics_move_as_those_of_torch(device, dtype):
    torch.manual_seed(0)
    module = torch.nn.BatchNorm2d(3, momentum=0.3).to(device)
    weight, bias = torch.ones(3, device=device), torch.zeros(3, device=device)
    mean, variance = torch.zeros(3, device=device, dtype=dtype), torch.ones(3, device=device, dtype=dtype)
    for _ in range(2):
        x = torch.randn(2, 3, 4, 4, device=device) * 3 + 1
        module(x)
        batch_norm_relu(x, weight, bias, mean, variance, True, 0.3, EPS)
    torch.testing.assert_close(mean.float(), module.running_mean, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(variance.float(), module.running_var, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_in_evaluation_running_statistics_stay(device):
    given = vectors(3, device)
    before = [one.clone() for one in given]
    batch_norm_relu(torch.randn(2, 3, 4, device=device), *given, False, MOMENTUM, EPS)
    assert all(map(torch.equal, given, before))


def test_statistics_of_the_batch_need_no_running_ones(device):
    x, (weight, bias, *_) = torch.randn(4, 3, 6, device=device), vectors(3, device)
    ours, theirs = (f(x, weight, bias, None, None, True, MOMENTUM, EPS) for f in (batch_norm_relu, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_stays(device, memory_format):
    x = torch.randn(2, 3, 4, 5, device=device).contiguous(memory_format=memory_format).requires_grad_()
    y = batch_norm_relu(x, *vectors(3, device), True, MOMENTUM, EPS)
    y.sum().backward()
    assert y.is_contiguous(memory_format=memory_format) and x.grad.is_contiguous(memory_format=memory_format)


def test_elements_may_have_gaps_between_them_and_weights_another_dtype(device):
    torch.manual_seed(0)
    x = torch.randn(5, 6, 8, device=device, dtype=torch.bfloat16).transpose(0, 1)[:, ::2, 1:6]
    for ours, exact in both(x, vectors(3, device)):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=2**-5)


def test_what_is_not_a_number_is_not_cut_off(device):
    x = torch.ones(2, 2, 4, device=device)
    x[0, 0, 0] = torch.nan
    y = batch_norm_relu(x, *vectors(2, device), True, MOMENTUM, EPS)
    assert y[:, 0].isnan().all() and not y[:, 1].isnan().any()


def test_frozen_weights_cost_no_pass(device, monkeypatch):
    monkeypatch.setattr(kernel, "backward_sums", None)
    x, given = torch.randn(2, 3, 4, device=device, requires_grad=True), vectors(3, device)
    batch_norm_relu(x, *given, False, MOMENTUM, EPS).sum().backward()
    gradient, x.grad = x.grad, None
    reference(x, *given, False, MOMENTUM, EPS).sum().backward()
    torch.testing.assert_close(gradient, x.grad)


def test_the_first_layer_needs_no_gradient_of_its_input(device, monkeypatch):
    monkeypatch.setattr(kernel, "backward_dx", None)
    x, (weight, bias, mean, variance) = torch.randn(2, 3, 4, device=device), vectors(3, device)
    batch_norm_relu(x, weight.requires_grad_(), bias, mean, variance, True, MOMENTUM, EPS).sum().backward()
    assert weight.grad is not None and bias.grad is None


def test_no_weights_no_elements_and_one_element_are_as_torch_has_them(device):
    x, (weight, bias, mean, variance) = torch.randn(2, 3, 4, device=device), vectors(3, device)
    plain = batch_norm_relu(x, None, None, mean, variance, False, MOMENTUM, EPS, relu=False)
    torch.testing.assert_close(plain, torch.nn.functional.batch_norm(x, mean, variance, eps=EPS))
    assert batch_norm_relu(x[:0], weight, bias, mean, variance, False, MOMENTUM, EPS).shape == (0, 3, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch_norm_relu(x[:1, :, :1], weight, bias, mean, variance, True, MOMENTUM, EPS)
    with pytest.raises(RuntimeError, match="weight"):
        batch_norm_relu(x, weight[:2], bias, mean, variance, True, MOMENTUM, EPS)


@pytest.mark.parametrize("last", [True, False])
def test_the_same_input_gives_the_same_bits(device, last):
    x, given = torch.randn(3, 1, 700, device=device), vectors(1, device)
    x = channels_last(x) if last else x
    first, second = (results(batch_norm_relu, x, given, x, True, True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_triton_does_not_reach_is_computed_all_the_same(device):
    x, given = torch.randn(3, 8, 2, device=device, dtype=torch.float64), vectors(8, device)
    ours, theirs = (results(f, x, given, x, True, True) for f in (batch_norm_relu, reference))
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(ours[-1], given[-1])


def test_the_operators_are_what_torch_asks_of_them(device):
    x = channels_last(torch.randn(3, 2, 4, device=device)).requires_grad_()
    weight, bias, mean, variance = vectors(2, device)
    learned = (weight.requires_grad_(), bias.requires_grad_())
    torch.library.opcheck(kernel.statistics, (x.detach(), mean, variance, MOMENTUM), test_utils=CHECKS)
    torch.library.opcheck(kernel.statistics, (x.detach(), None, None, MOMENTUM), test_utils=CHECKS)
    torch.library.opcheck(kernel.forward, (x, *learned, mean, variance, EPS, True, True), test_utils=CHECKS)
    fixed = [one.detach() for one in (*learned, mean, variance)]
    torch.library.opcheck(kernel.backward_sums, (x.detach(), x.detach(), fixed, EPS, True), test_utils=CHECKS)
    torch.library.opcheck(kernel.backward_dx, (x.detach(), x.detach(), fixed, [], EPS, True), test_utils=CHECKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    torch.manual_seed(0)
    x, given = torch.randn(3, 2, 4, 5, device=device), vectors(2, device)
    compiled = torch.compile(batch_norm_relu, fullgraph=True, backend="aot_eager")
    ours, theirs = (results(f, x, given, x, True, True) for f in (compiled, reference))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
