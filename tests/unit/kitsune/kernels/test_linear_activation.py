"""Two linear layers with an activation between them against the eager reference: odd shapes, dtypes, layouts."""

import pytest
import torch

from kitsune.kernels import linear_activation as kernel
from kitsune.kernels import products
from kitsune.kernels.bias_activation import KINDS
from kitsune.kernels.launch import DTYPES, IS_INTERPRETED
from kitsune.kernels.linear_activation import mlp, reference
from kitsune.kernels.products import Tiling

#: Of the norm of what is compared: activation, slopes and gradients are rounded (by the interpreter, cut off).
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
SMALL = {"high": 32, "wide": 32, "deep": 16, "stages": 2, "warps": 4}

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tiles of the GPU are tested in tests/gpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in tiny shapes, for three programs or for one."""
    monkeypatch.setattr(kernel, "FORWARD", Tiling(**SMALL, pieces=2, programs=3))
    monkeypatch.setattr(kernel, "BACKWARD", Tiling(**SMALL, pieces=4, programs=1))


@pytest.fixture
def no_way_out(monkeypatch):
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, rows, inner, hidden, out, dtype=torch.float32):
    """(x, w1, b1, w2, b2) that want gradients."""
    torch.manual_seed(0)
    shapes = (rows, inner), (hidden, inner), (hidden,), (out, hidden), (out,)
    x, w1, b1, w2, b2 = (torch.randn(shape, device=device) for shape in shapes)
    drawn = x, w1 / inner**0.5, b1, w2 / hidden**0.5, b2
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def results_of(function, tensors, kind, dtype=None):
    """(y, the gradients of those that want one), in `dtype`."""
    given = [one if one is None else one.detach().to(dtype or one.dtype) for one in tensors]
    leaves = [
        new.requires_grad_() for new, old in zip(given, tensors, strict=True) if old is not None and old.requires_grad
    ]
    y = function(*given, kind)
    dy = torch.linspace(-1, 2, y.numel(), device=y.device, dtype=torch.float64).view_as(y).sin().to(tensors[0].dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check(tensors, kind="gelu"):
    ours, exact = results_of(mlp, tensors, kind), results_of(reference, tensors, kind, torch.float64)
    assert len(ours) == len(exact)
    for one, right in zip(ours, exact, strict=True):
        assert (one.dtype, one.shape) == (tensors[0].dtype, right.shape)
        assert (one.double() - right).norm() <= TOLERANCES[one.dtype] * right.norm()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_weights_of_either_layout_are_read_as_they_lie(device, no_way_out, monkeypatch, is_transposed):
    """Those of the Conv1D of GPT-2 are transposed."""
    x, w1, b1, w2, b2 = draw(device, 70, 40, 48, 24)
    if is_transposed:
        w1, w2 = (weight.detach().t().contiguous().t().requires_grad_() for weight in (w1, w2))
    read = []
    monkeypatch.setattr(products, "readable", lambda matrix: read.append(matrix.is_contiguous()) or matrix)
    mlp(x, w1, b1, w2, b2, "gelu").square().sum().backward()
    assert len(read) == 8 and all(read)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_reference_does(no_way_out, device, dtype, kind):
    check(draw(device, 77, 24, 72, 40, dtype), kind)


@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (32, 16, 32, 16), (33, 40, 8, 24), (300, 8, 40, 8), (5, 8, 200, 8)])
def test_shapes_need_not_fit_the_tiles(no_way_out, device, shape):
    check(draw(device, *shape))


def test_layers_may_have_no_bias_and_x_more_dimensions(no_way_out, device):
    x, w1, b1, w2, b2 = draw(device, 42, 16, 40, 24)
    x = x.detach().view(2, 3, 7, 16).requires_grad_()
    check((x, w1, None, w2, None))
    check((x, w1, None, w2, b2))
    check((x, w1, b1, w2, None))


@pytest.mark.parametrize("wanted", range(5))
def test_only_what_wants_a_gradient_gets_one(no_way_out, device, wanted):
    tensors = [one.detach().requires_grad_(at == wanted) for at, one in enumerate(draw(device, 9, 8, 16, 8))]
    check(tensors)


def test_layouts_that_the_kernels_cannot_read_are_copied(no_way_out, device):
    x, w1, b1, w2, b2 = (one.detach() for one in draw(device, 20, 16, 24, 8))
    shifted = torch.cat((x.new_zeros(1), w2.flatten()))[1:].view_as(w2)
    tensors = [x.t().contiguous().t(), w1.t().contiguous().t(), b1.repeat_interleave(2)[::2], shifted, b2]
    check([one.requires_grad_() for one in tensors])


def test_a_gradient_may_be_one_number_for_all(no_way_out, device):
    tensors = draw(device, 40, 8, 16, 8)
    mlp(*tensors, "relu").sum().backward()
    ours = [one.grad for one in tensors]
    exact = torch.autograd.grad(reference(*tensors, "relu").sum(), tensors)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values_are_those_of_torch_and_nan_stays_nan(no_way_out, device, kind):
    values = [-3e4, -200.0, -20.0, -6.5, -5.5, -1e-3, 0.0, 1e-3, 5.5, 6.5, 20.0, 200.0, 3e4, 1.0, 2.0, torch.nan]
    bias, x, weight = torch.tensor(values, device=device), torch.zeros(2, 8, device=device), torch.zeros(16, 8)
    a, slopes = kernel.forward(x, weight.to(device), bias, kind)
    torch.testing.assert_close(a[1], KINDS[kind](bias), rtol=1e-5, atol=1e-6, equal_nan=True)
    dh, _ = kernel.backward(torch.ones(2, 8, device=device), torch.full((8, 16), 0.125, device=device), slopes)
    leaf = bias.clone().requires_grad_()
    (slope,) = torch.autograd.grad(KINDS[kind](leaf).sum(), leaf)
    torch.testing.assert_close(dh[0, :-1], slope[:-1], rtol=1e-5, atol=1e-5)


def test_no_rows_are_no_work(no_way_out, device):
    tensors = draw(device, 0, 8, 16, 8)
    mlp(*tensors, "gelu").sum().backward()
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in tensors)


def test_nothing_is_written_beyond_the_end(device, monkeypatch):
    x, w1, b1, w2, _ = (one.detach() for one in draw(device, 35, 8, 40, 8))
    found, new_empty = [], torch.Tensor.new_empty

    def room(like, *shape, **given):
        if shape == (0,):  # Triton's own
            return new_empty(like, *shape, **given)
        shape, dtype = shape or like.shape, given.get("dtype")
        memory = torch.full((shape[0] + 40, shape[1]), 7.0, device=like.device, dtype=dtype or like.dtype)
        found.append(memory[shape[0] :])
        return memory[: shape[0]]

    monkeypatch.setattr(torch, "empty_like", room)
    monkeypatch.setattr(torch.Tensor, "new_empty", room)
    _, slopes = kernel.forward(x, w1, b1, "gelu")
    kernel.backward(torch.ones(35, 8, device=device), w2, slopes)
    assert len(found) == 4 and all((memory == 7).all() for memory in found)


def test_the_same_input_gives_the_same_bits(device):
    tensors = draw(device, 70, 8, 40, 8)
    assert all(map(torch.equal, results_of(mlp, tensors, "silu"), results_of(mlp, tensors, "silu")))


def test_an_unknown_kind_is_refused_with_the_choices(device):
    with pytest.raises(ValueError, match=r"'swish' is no activation.*gelu, gelu_tanh, silu, relu"):
        mlp(*draw(device, 1, 8, 8, 8), "swish")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 6, 8, 8), torch.float16),
        ((3, 8, 12, 8), torch.float16),
        ((3, 8, 8, 4), torch.float16),
        ((3, 8, 8, 2), torch.float32),
        ((3, 8, 8, 8), torch.float64),
    ],
)
def test_what_the_kernels_do_not_reach_is_computed_all_the_same(device, shape, dtype):
    tensors = draw(device, *shape, dtype)
    assert not kernel.is_offered(*tensors)
    assert all(map(torch.equal, results_of(mlp, tensors, "gelu"), results_of(reference, tensors, "gelu")))


def test_layers_of_two_dtypes_raise_what_torch_raises(device):
    x, *layers = draw(device, 3, 8, 8, 8)
    with pytest.raises(RuntimeError, match="dtype"):
        mlp(x.half(), *layers, "gelu")


@pytest.mark.parametrize("of", range(5))
def test_a_second_derivative_is_refused_and_not_left_out(device, of):
    tensors = draw(device, 3, 8, 8, 8)
    (gradient,) = torch.autograd.grad(mlp(*tensors, "gelu").square().sum(), tensors[of], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_operators_are_what_torch_asks_of_them(device):
    x, w1, b1, w2, _ = (one.detach() for one in draw(device, 35, 8, 40, 8))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    _, slopes = kernel.forward(x, w1, b1, "gelu")
    torch.library.opcheck(kernel.forward, (x, w1, b1, "gelu"), test_utils=checks)
    torch.library.opcheck(kernel.forward, (x, w1, None, "relu"), test_utils=checks)
    torch.library.opcheck(kernel.backward, (torch.ones_like(x), w2, slopes), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(no_way_out, device):
    tensors = draw(device, 35, 8, 40, 8)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for one, other in zip(results_of(compiled, tensors, "gelu"), results_of(mlp, tensors, "gelu"), strict=True):
        torch.testing.assert_close(one, other)
