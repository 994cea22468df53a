"""dropout(x + bias) + residual: against its eager reference with the same mask, and the mask itself."""

import math

import pytest
import torch

from kitsune.kernels import dropout_add as kernel
from kitsune.kernels.dropout_add import dropout_add, reference
from kitsune.kernels.launch import DTYPES

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def next_seed(device, draws=1):
    """The seed that the call after this one draws; torch's generator is left as it was."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    seeds = [torch.randint(kernel.SEEDS, (1,), device=device) for _ in range(draws)]
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
    return seeds[-1]


def kept_of(seed, shape, p):
    """Which elements a seed keeps."""
    ones = torch.ones(shape, device=seed.device)
    return kernel.forward(ones, torch.zeros_like(ones), None, seed, p) != 0


def both(x, residual, p, bias, training=True):
    """(output, gradients of x, residual and, if there is one, bias) by the kernel and by the reference in fp64.

    Both have the same inputs and the same mask.
    """
    dy = torch.randn(x.shape, device=x.device, dtype=torch.float64).to(x.dtype)
    kept = kept_of(next_seed(x.device), x.shape, p) if p > 0 else None
    results = []
    for function, wide, more in ((dropout_add, False, ()), (reference, True, (kept,))):
        given = [one.detach().double() if wide else one.detach() for one in (x, residual, bias) if one is not None]
        leaves = [one.requires_grad_() for one in given]
        y = function(*leaves[:2], p, leaves[2] if bias is not None else None, training, *more)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    return zip(*results, strict=True)


def check(x, residual, p, bias, tolerance):
    for ours, exact in both(x, residual, p, bias):
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (70,), (7, 100), (2, 130), (90, 17), (40, 1)])
def test_it_computes_what_the_reference_does(device, dtype, shape):
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    bias = torch.randn(shape[-1], device=device).to(dtype)
    check(x, residual, 0.3, bias, TOLERANCES[dtype])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_chance_computes_what_the_reference_does(device, p, with_bias):
    x, residual = torch.randn(2, 9, 70, device=device)
    check(x, residual, p, torch.randn(70, device=device) if with_bias else None, 3e-6)


def test_a_program_may_have_many_tiles_to_sum(device, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 2)
    x, residual = torch.randn(2, 130, 140, device=device)
    check(x, residual, 0.5, torch.randn(140, device=device), TOLERANCES[torch.float32])


def test_results_have_the_dtypes_of_what_they_belong_to(device):
    x, residual, bias = torch.randn(3, 3, 8, device=device)
    dtypes = [ours.dtype for ours, _ in both(x.bfloat16(), residual, 0.5, bias[0].half())]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16]


def test_inputs_may_have_gaps_and_another_order(device):
    wide = torch.randn(4, 6, 40, device=device)
    bias = torch.randn(54, device=device)[::2]
    check(wide.transpose(0, 1)[..., 3:30], wide.transpose(0, 1)[..., 10:37], 0.5, bias, TOLERANCES[torch.float32])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_p_and_what_is_kept_is_scaled(device, p):
    torch.manual_seed(0)
    ones = torch.ones(100, 256, device=device)
    y = dropout_add(ones, torch.zeros_like(ones), p)
    deviation = math.sqrt(p * (1 - p) / y.numel())
    assert abs((y == 0).double().mean().item() - p) < 5 * deviation
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    for along in (0, 1):
        each = (y == 0).double().mean(along)
        assert (each - p).abs().max() < 6 * math.sqrt(p * (1 - p) / y.shape[along])


def test_no_two_rows_and_no_two_columns_share_a_mask(device):
    kept = kept_of(torch.tensor([7], device=device), (100, 150), 0.5)
    assert kept.unique(dim=0).shape[0] == 100 and kept.unique(dim=1).shape[1] == 150


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(device, with_bias):
    x = torch.ones(60, 100, device=device, requires_grad=True)
    bias = torch.zeros(100, device=device, requires_grad=True) if with_bias else None
    y = dropout_add(x, torch.zeros_like(x), 0.4, bias)
    y.sum().backward()
    assert torch.equal(x.grad, y) and 0 < y.count_nonzero() < y.numel()
    if with_bias:
        torch.testing.assert_close(bias.grad, y.sum(0))


def test_another_call_draws_another_mask_and_a_seed_set_anew_the_same(device):
    torch.manual_seed(0)
    ones = torch.ones(20, 100, device=device)
    first, second = (dropout_add(ones, ones, 0.5) for _ in range(2))
    torch.manual_seed(0)
    assert not torch.equal(first, second) and torch.equal(dropout_add(ones, ones, 0.5), first)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (1.0, False)])
def test_no_random_numbers_are_drawn_where_nothing_is_dropped(device, p, training):
    x, residual = torch.randn(2, 3, 20, device=device)
    seed = next_seed(device)
    assert torch.equal(dropout_add(x, residual, p, training=training), x + residual)
    assert torch.equal(seed, next_seed(device))


def test_the_residual_alone_is_left_when_all_is_dropped(device):
    x, residual = torch.randn(2, 3, 20, device=device, requires_grad=True).unbind()
    bias = torch.randn(20, device=device, requires_grad=True)
    y = dropout_add(x, residual, 1.0, bias)
    dx, dresidual, dbias = torch.autograd.grad(y.sum(), (x, residual, bias))
    assert torch.equal(y, residual) and torch.equal(dresidual, torch.ones_like(y))
    assert not dx.any() and not dbias.any()


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_a_chance_that_is_none_is_refused(device, p):
    with pytest.raises(ValueError, match="from 0 to 1"):
        dropout_add(torch.ones(2, device=device), torch.ones(2, device=device), p)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_nothing_is_launched_for_nothing(device, shape, p):
    x, residual = (torch.ones(shape, device=device, requires_grad=True) for _ in range(2))
    bias = torch.ones(shape[-1], device=device, requires_grad=True)
    (dropout_add(x, residual, p, bias) + dropout_add(x, residual, p)).sum().backward()
    assert x.grad.shape == residual.grad.shape == shape
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_nothing_is_written_beyond_the_end(device, beyond):
    x, bias = torch.ones(9, 70, device=device), torch.ones(70, device=device)
    kernel.forward(x, x, bias, None, 0.0)
    kernel.backward(x, bias, None, 0.0)
    assert len(beyond) == 2 and all((memory == 7).all() for memory in beyond)


def test_the_same_seed_gives_the_same_bits(device):
    x, bias, seed = torch.randn(60, 33, device=device), torch.randn(33, device=device), next_seed(device)
    first, second = (kernel.backward(x, bias, seed, 0.5) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert torch.equal(*(kernel.forward(x, x, bias, seed, 0.5) for _ in range(2)))


@pytest.mark.parametrize(
    ("dtype", "columns", "bias"), [(torch.float64, 8, 8), (torch.float32, 1, 8), (torch.float32, 8, 1)]
)
def test_what_triton_does_not_reach_is_computed_all_the_same(device, dtype, columns, bias):
    x, residual = torch.randn(3, 8, device=device, dtype=dtype), torch.randn(3, columns, device=device)
    bias = torch.randn(bias, device=device)
    torch.manual_seed(0)
    y = dropout_add(x, residual, 0.5, bias)
    torch.manual_seed(0)
    assert torch.equal(y, reference(x, residual, 0.5, bias))
    assert 0 < (y == residual).sum() < y.numel()


def test_the_operator_is_what_torch_asks_of_one(device):
    x, residual = (torch.randn(3, 5, device=device, requires_grad=True) for _ in range(2))
    bias, seed = torch.randn(5, device=device, requires_grad=True), next_seed(device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for given in ((bias, seed), (None, seed), (bias, None), (None, None)):
        torch.library.opcheck(kernel.forward, (x, residual, *given, 0.5), test_utils=checks)
    for given in (bias.detach(), None):
        torch.library.opcheck(kernel.backward, (x.detach(), given, seed, 0.5), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole_and_draws_anew_each_time(device):
    x, bias = torch.ones(8, 50, device=device), torch.zeros(50, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: dropout_add(x, x, 0.5, bias), fullgraph=True, backend="aot_eager")
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    second.sum().backward()
    torch.testing.assert_close(bias.grad, (second - x).sum(0).detach())
