"""Rotary embedding against its eager reference and against complex numbers: layouts, dtypes, kinds of angles."""

import pytest
import torch

from kitsune.kernels import rope as kernel
from kitsune.kernels.launch import DTYPES
from kitsune.kernels.rope import reference, rope

#: One unit in the last place, twice over: the interpreter cuts off where torch rounds.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def angles(*shape, device, dtype=torch.float32):
    """(cos, sin) of random angles."""
    angle = torch.rand(shape, device=device, dtype=torch.float64) * 6.28
    return angle.cos().to(dtype), angle.sin().to(dtype)


def check(x, cos, sin, interleaved, tolerance):
    """Output and gradient by the kernel are those by the reference in fp64, for the same inputs."""
    dy = torch.randn(x.shape, device=x.device, dtype=torch.float64).to(x.dtype)
    ours, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    for function, leaf, given in ((rope, ours, (cos, sin)), (reference, exact, (cos.double(), sin.double()))):
        y = function(leaf, *given, interleaved)
        y.backward(dy.to(y.dtype))
        leaf.y = y.detach()
    assert ours.y.dtype == ours.grad.dtype == x.dtype
    for one, other in ((ours.y, exact.y), (ours.grad, exact.grad)):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2), (2, 3, 5, 8), (1, 12, 7, 64), (2, 7, 3, 80), (1, 1, 40, 6), (1, 23, 2, 4)]
)
def test_it_computes_what_the_reference_does(device, dtype, shape, interleaved):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    check(x, *angles(shape[2], shape[3] // 2, device=device, dtype=dtype), interleaved, TOLERANCES[dtype])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_that_is_turned(device, interleaved):
    x, (cos, sin) = torch.randn(2, 4, 5, 8, device=device), angles(5, 4, device=device)
    pairs = x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).mT
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    expected = result.flatten(-2) if interleaved else result.mT.flatten(-2)
    torch.testing.assert_close(rope(x, cos, sin, interleaved), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_lie_within_each_position_and_so_do_those_of_the_result(device, dtype, interleaved):
    packed = torch.randn(2, 6, 3, 4, 16, device=device).to(dtype)
    x, (cos, sin) = packed[:, :, 1].transpose(1, 2), angles(6, 8, device=device)
    check(x, cos, sin, interleaved, TOLERANCES[dtype])
    y = rope(x, cos, sin, interleaved)
    assert y.transpose(1, 2).is_contiguous() and rope(x.contiguous(), cos, sin, interleaved).is_contiguous()
    torch.testing.assert_close(y, rope(x.contiguous(), cos, sin, interleaved))


def test_x_may_have_gaps_anywhere(device):
    x, (cos, sin) = torch.randn(2, 4, 5, 16, device=device), angles(5, 4, device=device)
    for gapped in (x[..., ::2], x[..., 3:11], x.mT.contiguous().mT[..., :8], x[:, :1, :, :8].expand(2, 4, 5, 8)):
        check(gapped, cos, sin, False, TOLERANCES[torch.float32])


@pytest.mark.parametrize("shape", [(5, 4), (1, 5, 4), (2, 5, 4)])
@pytest.mark.parametrize("doubled", [False, True])
def test_angles_may_be_one_for_all_or_each_samples_own_and_given_twice(device, shape, doubled):
    x, given = torch.randn(2, 4, 5, 8, device=device), angles(*shape, device=device)
    cos, sin = (torch.cat((angle, angle), -1) if doubled else angle for angle in given)
    for interleaved in (False, True):
        check(x, cos, sin, interleaved, TOLERANCES[torch.float32])
        torch.testing.assert_close(rope(x, cos, sin, interleaved), rope(x, *given, interleaved))


def test_angles_may_have_gaps_and_dtypes_of_their_own(device):
    cos, sin = angles(5, 8, device=device)
    x = torch.randn(2, 4, 5, 8, device=device, dtype=torch.bfloat16)
    for one, other in ((cos[:, ::2], sin[:, :4]), (cos[:, 4:].contiguous(), sin.mT.contiguous().mT[:, :4].half())):
        check(x, one, other, False, TOLERANCES[torch.bfloat16])


def test_it_is_what_hugging_face_computes(device):
    x, (cos, sin) = torch.randn(2, 4, 5, 8, device=device), angles(2, 5, 4, device=device)
    cos, sin = (torch.cat((angle, angle), -1) for angle in (cos, sin))
    rotated = torch.cat((-x[..., 4:], x[..., :4]), -1)
    expected = x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
    torch.testing.assert_close(rope(x, cos, sin), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_turn_changes_nothing_and_a_turn_back_undoes_a_turn(device, interleaved):
    x, (cos, sin) = torch.randn(2, 4, 5, 8, device=device), angles(5, 4, device=device)
    assert torch.equal(rope(x, torch.ones_like(cos), torch.zeros_like(sin), interleaved), x)
    torch.testing.assert_close(rope(rope(x, cos, sin, interleaved), cos, -sin, interleaved), x)


def test_a_gradient_has_a_gradient(device):
    x, (cos, sin) = torch.randn(1, 2, 3, 4, device=device, requires_grad=True), angles(3, 2, device=device)
    (dx,) = torch.autograd.grad(rope(x, cos, sin).square().sum(), x, create_graph=True)
    dx.sum().backward()
    torch.testing.assert_close(dx, 2 * x)  # a turn keeps lengths
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_nothing_is_launched_for_nothing(device, shape):
    x = torch.ones(shape, device=device, requires_grad=True)
    rope(x, *angles(shape[2], shape[3] // 2, device=device)).sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_is_written_beyond_the_end(device, monkeypatch, interleaved):
    x, (cos, sin) = torch.ones(1, 7, 3, 6, device=device), angles(3, 3, device=device)
    memory = torch.full((5000,), 7.0, device=device)
    monkeypatch.setattr(torch, "empty_permuted", lambda shape, *_, **__: memory[: x.numel()].view(shape))
    kernel.turned(x, cos, sin, interleaved, False)
    assert (memory[: x.numel()] != 7).all() and (memory[x.numel() :] == 7).all()


def test_the_same_input_gives_the_same_bits(device):
    x, (cos, sin) = torch.randn(2, 4, 30, 16, device=device), angles(30, 8, device=device)
    assert torch.equal(*(rope(x, cos, sin) for _ in range(2)))


def test_angles_get_gradients_where_they_want_them(device):
    x, (cos, sin) = torch.randn(2, 4, 5, 8, device=device), angles(5, 4, device=device)
    rope(x, cos.requires_grad_(), sin.requires_grad_()).sum().backward()
    assert cos.grad.any() and sin.grad.any()


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float64, (2, 3, 5, 8)), (torch.float32, (3, 5, 8))])
def test_what_triton_does_not_reach_is_computed_all_the_same(device, dtype, shape):
    x, (cos, sin) = torch.randn(shape, device=device, dtype=dtype), angles(5, 4, device=device)
    assert torch.equal(rope(x, cos, sin), reference(x, cos, sin))


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5, 4)])
def test_angles_that_do_not_fit_are_refused_by_torch(device, shape):
    x, (cos, sin) = torch.randn(2, 4, 5, 8, device=device), angles(*shape, device=device)
    with pytest.raises(RuntimeError, match="must match"):
        rope(x, cos, sin)


def test_the_operator_is_what_torch_asks_of_one(device):
    x, (cos, sin) = torch.randn(2, 4, 5, 8, device=device, requires_grad=True), angles(5, 4, device=device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for given in (x, x.detach().transpose(1, 2).contiguous().transpose(1, 2), x.detach().mT.contiguous().mT):
        for flags in ((False, False), (True, True)):
            torch.library.opcheck(kernel.turned, (given, cos, sin, *flags), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(device):
    x, (cos, sin) = torch.randn(2, 5, 4, 8, device=device, requires_grad=True), angles(5, 4, device=device)
    compiled = torch.compile(lambda x: rope(x.transpose(1, 2), cos, sin), fullgraph=True, backend="aot_eager")
    compiled(x).square().mul(cos[:, :1]).sum().backward()
    gradient, x.grad = x.grad, None
    reference(x.transpose(1, 2), cos, sin).square().mul(cos[:, :1]).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
