"""silu(gate) * up against its eager reference: forward, both gradients, odd shapes, strides, dtypes, torch.compile."""

import pytest
import torch

from kitsune.kernels import swiglu as kernel
from kitsune.kernels.launch import DTYPES
from kitsune.kernels.swiglu import in_rows, reference, swiglu

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def check(gate, up, tolerance):
    """Output and gradients of gate and up by the kernel are those by the reference in fp64, for the same inputs."""
    dy = torch.randn(gate.shape, device=gate.device, dtype=torch.float64).to(gate.dtype)
    results = []
    for function, wide in ((swiglu, False), (reference, True)):
        given = [one.detach().double() if wide else one.detach() for one in (gate, up)]
        leaves = [one.requires_grad_() for one in given]
        y = function(*leaves)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for like, ours, exact in zip((gate, gate, up), *results, strict=True):
        assert ours.dtype == like.dtype
        scale = exact.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (70,), (7, 100), (2, 700), (150, 17), (40, 1)])
def test_it_computes_what_the_reference_does(device, dtype, shape):
    torch.manual_seed(0)
    gate, up = torch.randn(2, *shape, device=device).to(dtype)
    check(gate, up, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_halves_of_a_projection_are_read_where_they_lie(device, dtype):
    gate, up = torch.randn(2, 3, 2 * 40, device=device).to(dtype).chunk(2, -1)
    for half in (gate, up):
        assert in_rows(half).data_ptr() == half.data_ptr() and in_rows(half).stride() == (80, 1)
    check(gate, up, TOLERANCES[dtype])


def test_halves_in_turn_and_other_orders_are_read_too(device):
    wide = torch.randn(4, 6, 40, device=device)
    check(wide[..., ::2], wide[..., 1::2], TOLERANCES[torch.float32])
    check(wide.transpose(0, 1), wide.transpose(0, 1).flip(0), TOLERANCES[torch.float32])
    check(wide.mT, wide[0, 0].expand(4, 40, 40)[..., :6], TOLERANCES[torch.float32])


def test_gate_and_up_may_differ_in_dtype(device):
    gate, up = torch.randn(2, 3, 20, device=device)
    check(gate.bfloat16(), up, TOLERANCES[torch.bfloat16])
    check(gate, up.half(), TOLERANCES[torch.float16])


def test_a_gradient_may_be_one_number_for_all(device):
    gate, up = torch.randn(2, 3, 20, device=device)
    up.requires_grad_()
    swiglu(gate, up).sum().backward()
    torch.testing.assert_close(up.grad, torch.nn.functional.silu(gate))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, where a GPU is silent
def test_extreme_values_are_those_of_torch_and_nan_stays_nan(device):
    gate = torch.tensor([-1e30, -200.0, -20.0, -0.0, 20.0, 200.0, 1e30, torch.nan], device=device, requires_grad=True)
    up = torch.full((8,), 2.0, device=device, requires_grad=True)
    results = []
    for function in (swiglu, reference):
        y = function(gate, up)
        results.append((y, *torch.autograd.grad(y.sum(), (gate, up))))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert results[0][0][-1].isnan()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_nothing_is_launched_for_nothing(device, shape):
    gate, up = (torch.ones(shape, device=device, requires_grad=True) for _ in range(2))
    swiglu(gate, up).sum().backward()
    assert gate.grad.shape == up.grad.shape == shape


def test_nothing_is_written_beyond_the_end(device, beyond):
    gate, up = torch.ones(2, 9, 70, device=device)
    kernel.forward(gate, up)
    kernel.backward(gate, gate, up)
    assert len(beyond) == 3 and all((memory == 7).all() for memory in beyond)


def test_the_same_input_gives_the_same_bits(device):
    gate, up = torch.randn(2, 200, 33, device=device)
    first, second = (kernel.backward(gate, gate, up) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float64, 8), (torch.float32, 1)])
def test_what_triton_does_not_reach_is_computed_all_the_same(device, dtype, columns):
    gate, up = torch.randn(3, 8, device=device, dtype=dtype), torch.randn(3, columns, device=device)
    assert torch.equal(swiglu(gate, up), reference(gate, up))


def test_the_operator_is_what_torch_asks_of_one(device):
    gate, up = (torch.randn(2, 3, 5, device=device, requires_grad=True) for _ in range(2))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernel.forward, (gate, up), test_utils=checks)
    gate, up = torch.randn(2, 3, 10, device=device).chunk(2, -1)
    torch.library.opcheck(kernel.forward, (gate.mT, up.mT), test_utils=checks)
    torch.library.opcheck(kernel.backward, (gate.contiguous(), gate, up), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    x = torch.randn(3, 10, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: swiglu(*x.chunk(2, -1)), fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    gradient, x.grad = x.grad, None
    reference(*x.chunk(2, -1)).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
