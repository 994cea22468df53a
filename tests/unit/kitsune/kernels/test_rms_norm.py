"""RMSNorm against its eager reference: forward, both gradients, odd shapes, strides, dtypes, torch.compile."""

import pytest
import torch

from kitsune.kernels import rms_norm as kernel
from kitsune.kernels import rows
from kitsune.kernels.launch import DTYPES, MOST_IN_A_BLOCK
from kitsune.kernels.rms_norm import reference, rms_norm

EPS = 1e-6
#: One unit in the last place, twice over: the interpreter cuts off where torch rounds, and sums go in another order.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def both(x, weight, dtype):
    """(output, gradients of x and weight) by the kernel and by the reference in fp64, for the same inputs."""
    dy = torch.randn(x.shape, device=x.device, dtype=torch.float64).to(dtype)
    results = []
    for function, wide in ((rms_norm, False), (reference, True)):
        given = [one.detach().double() if wide else one.detach() for one in (x, weight)]
        leaves = [one.requires_grad_() for one in given]
        y = function(*leaves, EPS)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (7, 100), (1, 1000), (300, 17), (2, 2100)])
def test_it_computes_what_the_reference_does(device, dtype, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    for ours, exact in both(x, weight, dtype):
        assert ours.dtype == dtype
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


def test_many_rows_are_shared_by_few_programs(device, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)
    assert rows.shares_of(15, *rows.tile_of(15, 530)[::2]) == (4, 4)
    x, weight = torch.randn(15, 530, device=device), torch.randn(530, device=device)
    for ours, exact in both(x, weight, torch.float32):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-5)


def test_rows_may_have_gaps_between_them_and_a_weight_of_another_dtype(device):
    wide = torch.randn(4, 6, 40, device=device, dtype=torch.bfloat16)
    x, weight = wide.transpose(0, 1)[..., 3:30], torch.randn(54, device=device)[::2]
    for ours, exact in both(x, weight, torch.bfloat16):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_nothing_is_launched_for_nothing(device, shape):
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], device=device, requires_grad=True)
    rms_norm(x, weight, EPS).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_the_same_input_gives_the_same_bits(device, monkeypatch):
    monkeypatch.setattr(rows, "MULTIPROCESSORS", 1)
    x, weight = torch.randn(15, 530, device=device), torch.randn(530, device=device)
    _, scales = kernel.forward(x, weight, EPS)
    first, second = (kernel.backward(x, x, weight, scales) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_triton_does_not_reach_is_computed_all_the_same(device):
    x, weight = torch.randn(3, 8, device=device, dtype=torch.float64), torch.ones(8, device=device)
    assert torch.equal(rms_norm(x, weight, EPS), reference(x, weight, EPS))
    x, weight = torch.randn(2, MOST_IN_A_BLOCK + 1, device=device), torch.ones(MOST_IN_A_BLOCK + 1, device=device)
    assert torch.equal(rms_norm(x, weight, EPS), reference(x, weight, EPS))


@pytest.mark.parametrize("length", [3, 8, 17])
def test_a_weight_of_another_length_is_refused_by_torch(device, length):
    with pytest.raises(RuntimeError, match="must match"):
        rms_norm(torch.randn(4, 16, device=device), torch.ones(length, device=device), EPS)


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (4, 16)])
def test_a_weight_that_is_broadcast_is_no_row(device, shape):
    x, weight = torch.randn(4, 16, device=device), torch.rand(shape, device=device)
    for ours, exact in both(x, weight, torch.float32):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_operator_is_what_torch_asks_of_one(device):
    x, weight = torch.randn(3, 5, device=device, requires_grad=True), torch.randn(5, device=device, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.forward, (x, weight, EPS), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    x, weight = torch.randn(3, 5, device=device), torch.randn(5, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: rms_norm(x, weight, EPS), fullgraph=True, backend="aot_eager")
    y = compiled(x)
    y.sum().backward()
    gradient, weight.grad = weight.grad, None
    reference(x, weight, EPS).sum().backward()
    torch.testing.assert_close(gradient, weight.grad)
