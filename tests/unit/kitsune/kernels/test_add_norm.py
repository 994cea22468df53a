"""Sum and norm at once against their eager references: both outputs, every gradient, rounding, torch.compile."""

import pytest
import torch

from kitsune.kernels import add_norm as kernel
from kitsune.kernels import rows
from kitsune.kernels.add_norm import add_layer_norm, add_rms_norm, reference, rms_reference
from kitsune.kernels.launch import DTYPES, MOST_IN_A_BLOCK

EPS = 1e-5
#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
PAIRS = {"layer": (add_layer_norm, reference, 2), "rms": (add_rms_norm, rms_reference, 1)}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")

kinds = pytest.mark.parametrize("kind", PAIRS)


def eighths(shape, device):
    """Numbers whose sums no dtype rounds, so that the reference in fp64 norms the same sums."""
    return torch.randint(-31, 32, shape, device=device) / 8


def inputs(device, shape, dtype, kind):
    x, residual = eighths(shape, device).to(dtype), eighths(shape, device).to(dtype)
    return x, residual, *(torch.randn(shape[-1], device=device).to(dtype) for _ in range(PAIRS[kind][2]))


def both(kind, given, used=(True, True)):
    """(what is used of norm and sum, gradients of every tensor there is) by the kernel, by the reference in fp64."""
    slopes = [torch.randn(given[0].shape, device=given[0].device).to(given[0].dtype) for _ in range(2)]
    results = []
    for function, wide in zip(PAIRS[kind][:2], (False, True), strict=True):
        detached = [one if one is None else one.detach() for one in given]
        leaves = [one if one is None else (one.double() if wide else one).requires_grad_() for one in detached]
        chosen = [one for one, is_used in zip(function(*leaves, EPS), used, strict=True) if is_used]
        torch.autograd.backward(chosen, [slope.to(one.dtype) for one, slope in zip(chosen, slopes, strict=False)])
        results.append((*(one.detach() for one in chosen), *(leaf.grad for leaf in leaves if leaf is not None)))
    return zip(*results, strict=True)


def assert_same(kind, given, tolerance, used=(True, True)):
    for ours, exact in both(kind, given, used):
        assert (ours is None) == (exact is None)
        if exact is not None:
            scale = exact.abs().max().item() + 1
            torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance * scale)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 1000), (300, 17)])
def test_it_computes_what_the_reference_does(device, dtype, shape, kind):
    torch.manual_seed(0)
    given = inputs(device, shape, dtype, kind)
    assert [one.dtype for one in PAIRS[kind][0](*given, EPS)] == [dtype, dtype]
    assert_same(kind, given, TOLERANCES[dtype])


@kinds
@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_either_output_may_be_left_unused(device, kind, used):
    assert_same(kind, inputs(device, (5, 40), torch.float32, kind), 2e-6, used)


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, True), (False, False)])
def test_weight_and_bias_may_each_be_missing(device, has_weight, has_bias):
    x, residual, weight, bias = inputs(device, (5, 40), torch.float32, "layer")
    assert_same("layer", (x, residual, weight if has_weight else None, bias if has_bias else None), 2e-6)


@pytest.mark.parametrize("function", [add_layer_norm, reference])
def test_the_norm_is_of_the_sum_as_it_was_rounded(device, function):
    """From 256 on, bf16 has the even numbers only, so all these sums are the same, and nothing is left but the bias."""
    x = torch.full((3, 40), 256.0, dtype=torch.bfloat16, device=device)
    residual = torch.rand(3, 40, device=device).mul(0.9).bfloat16()
    bias = torch.randn(40, dtype=torch.bfloat16, device=device)
    normed, total = function(x, residual, torch.ones_like(bias), bias, EPS)
    assert torch.equal(total, x)
    torch.testing.assert_close(normed, bias.expand(3, 40))


def test_many_rows_are_shared_by_few_programs(device, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)
    assert rows.shares_of(15, *rows.tile_of(15, 530)[::2]) == (4, 4)
    assert_same("layer", inputs(device, (15, 530), torch.float32, "layer"), 2e-6)


def test_a_mean_may_be_far_larger_than_the_deviation(device):
    """In fp32 the mean of the squares of such a row is known to 0.06, and so would be that less the mean's square."""
    x, *rest = inputs(device, (4, 600), torch.float32, "layer")
    assert_same("layer", (1e3 + x, *rest), 1e-3)


@kinds
def test_rows_may_have_gaps_between_them_and_every_tensor_its_own_dtype(device, kind):
    x = eighths((4, 6, 40), device).bfloat16().transpose(0, 1)[..., 3:30]
    residual = eighths((6, 4, 54), device)[..., ::2]
    weight, bias = torch.randn(54, device=device)[::2], torch.randn(27, device=device, dtype=torch.float16)
    given = (x, residual, weight, bias)[: 2 + PAIRS[kind][2]]
    for ours, exact in both(kind, given):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=2**-4)
    leaves = [one.detach().requires_grad_() for one in given]
    outputs = PAIRS[kind][0](*leaves, EPS)
    gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(one) for one in outputs])
    assert [one.dtype for one in outputs] == [torch.bfloat16, torch.bfloat16]
    assert [one.dtype for one in gradients] == [one.dtype for one in given]


def test_a_tensor_may_be_added_to_itself(device):
    x, weight = torch.randn(3, 8, device=device, requires_grad=True), torch.randn(8, device=device)
    ours, theirs = (torch.autograd.grad(sum(f(x, x, weight, EPS)).sum(), x) for f in (add_rms_norm, rms_reference))
    torch.testing.assert_close(ours, theirs)


@kinds
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_nothing_is_launched_for_nothing(device, shape, kind):
    x, residual, *weights = (one.requires_grad_() for one in inputs(device, shape, torch.float32, kind))
    sum(PAIRS[kind][0](x, residual, *weights, EPS)).sum().backward()
    assert x.grad.shape == residual.grad.shape == shape
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in weights)


def test_the_same_input_gives_the_same_bits(device, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)
    x, residual, weight, bias = inputs(device, (15, 530), torch.float32, "layer")
    _, total, means, scales = kernel.forward(x, residual, weight, bias, EPS, True)
    first, second = (kernel.backward(x, residual, total, weight, bias, means, scales, True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@kinds
def test_what_triton_does_not_reach_is_computed_all_the_same(device, kind):
    function, eager, _ = PAIRS[kind]
    given = inputs(device, (3, 8), torch.float32, kind)
    wide = tuple(one.double() for one in given)
    long = inputs(device, (2, MOST_IN_A_BLOCK + 1), torch.float32, kind)
    broadcast = (given[0], given[1][:1], *given[2:])
    for arguments in (wide, long, broadcast):
        assert all(map(torch.equal, function(*arguments, EPS), eager(*arguments, EPS)))


def test_weights_of_another_length_are_refused_by_torch(device):
    x, weight = torch.randn(4, 16, device=device), torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match="same shape"):
        add_layer_norm(x, x, weight, weight, EPS)
    with pytest.raises(RuntimeError, match="same shape"):
        add_layer_norm(x, x, torch.ones(16, device=device), weight[:1], EPS)
    with pytest.raises(RuntimeError, match="must match"):
        add_rms_norm(x, x, weight, EPS)


def test_a_gain_of_one_element_is_broadcast(device):
    x, gain = torch.randn(4, 16, device=device), torch.tensor([3.0], device=device, requires_grad=True)
    normed, total = add_rms_norm(x, x, gain, EPS)
    torch.testing.assert_close(normed, 3 * torch.nn.functional.rms_norm(2 * x, (16,), eps=EPS))
    assert torch.equal(total, 2 * x)
    (slope,) = torch.autograd.grad(normed.sum(), gain)
    torch.testing.assert_close(slope, (normed.detach().sum() / 3).reshape(1))


@pytest.mark.parametrize("kind", ["layer", "rms", "plain"])
def test_the_operators_are_what_torch_asks_of_them(device, kind):
    x, residual, weight, bias = (one.requires_grad_() for one in inputs(device, (3, 5), torch.float32, "layer"))
    weights = {"layer": (weight, bias), "rms": (weight, None), "plain": (None, None)}[kind]
    is_centred = kind != "rms"
    torch.library.opcheck(kernel.forward, (x, residual, *weights, EPS, is_centred), test_utils=CHECKS)
    _, total, means, scales = (one.detach() for one in kernel.forward(x, residual, *weights, EPS, is_centred))
    for dtotal in (None, total):
        given = (total, dtotal, total, *weights, means, scales, is_centred)
        torch.library.opcheck(kernel.backward, given, test_utils=CHECKS)


@kinds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device, kind):
    function, eager, _ = PAIRS[kind]
    leaves = [one.requires_grad_() for one in inputs(device, (3, 5), torch.float32, kind)]
    compiled = torch.compile(lambda *given: loss(function, given), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*leaves), leaves)
    for one, other in zip(ours, torch.autograd.grad(loss(eager, leaves), leaves), strict=True):
        torch.testing.assert_close(one, other)


def loss(function, given):
    normed, total = function(*given, EPS)
    return normed.square().sum() + total.sin().sum()
