"""The gated block of a transformer against the eager reference: odd shapes, dtypes, layouts."""

import pytest
import torch

from kitsune.kernels import gated_linear as kernel
from kitsune.kernels.bias_activation import KINDS
from kitsune.kernels.gated_linear import gated_mlp, joined_gated_mlp, reference
from kitsune.kernels.launch import DTYPES, IS_INTERPRETED
from kitsune.kernels.products import Tiling

#: Of the norm of what is compared: what is stored, and gradients, are rounded (by the interpreter, cut off).
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
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
    """(x, gate, up, down) that want gradients."""
    torch.manual_seed(0)
    shapes = (rows, inner), (hidden, inner), (hidden, inner), (out, hidden)
    x, *weights = (torch.randn(shape, device=device) for shape in shapes)
    drawn = x, *(weight / weight.shape[1] ** 0.5 for weight in weights)
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def results_of(function, tensors, kind, dtype=None):
    """(y, the gradients of those that want one), in `dtype`."""
    given = [one.detach().to(dtype or one.dtype) for one in tensors]
    leaves = [new.requires_grad_() for new, old in zip(given, tensors, strict=True) if old.requires_grad]
    y = function(*given, kind)
    dy = torch.linspace(-1, 2, y.numel(), device=y.device, dtype=torch.float64).view_as(y).sin().to(tensors[0].dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check(tensors, kind="silu"):
    ours, exact = results_of(gated_mlp, tensors, kind), results_of(reference, tensors, kind, torch.float64)
    assert len(ours) == len(exact)
    for one, right in zip(ours, exact, strict=True):
        assert (one.dtype, one.shape) == (tensors[0].dtype, right.shape)
        assert (one.double() - right).norm() <= TOLERANCES[one.dtype] * right.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_reference_does(no_way_out, device, dtype, kind):
    check(draw(device, 77, 24, 72, 40, dtype), kind)


@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (32, 16, 32, 16), (33, 40, 8, 24), (300, 8, 40, 8), (5, 8, 200, 8)])
def test_shapes_need_not_fit_the_tiles(no_way_out, device, shape):
    check(draw(device, *shape))


def test_x_may_have_more_dimensions(no_way_out, device):
    x, *weights = draw(device, 42, 16, 40, 24)
    check((x.detach().view(2, 3, 7, 16).requires_grad_(), *weights))
    check((x.detach()[0].requires_grad_(), *weights))


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,)])
@pytest.mark.parametrize("sizes", [(42, 16, 40, 24), (5, 6, 7, 3)], ids=["by the kernels", "by the reference"])
def test_one_weight_for_gate_and_up_is_as_two(device, wanted, sizes):
    x, gate, up, down = (one.detach() for one in draw(device, *sizes))
    given = [x, torch.cat((gate, up)), down]
    for number in wanted:
        given[number].requires_grad_()

    def two(x, joined, down, kind):
        return gated_mlp(x, *joined.chunk(2), down, kind)

    ours, wanted = results_of(joined_gated_mlp, given, "silu"), results_of(two, given, "silu")
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2), (0, 1, 3)])
def test_only_what_wants_a_gradient_gets_one(no_way_out, device, wanted):
    check([one.detach().requires_grad_(at in wanted) for at, one in enumerate(draw(device, 9, 8, 16, 8))])


def test_layouts_that_the_kernels_cannot_read_are_copied(no_way_out, device):
    x, gate, up, down = (one.detach() for one in draw(device, 20, 16, 24, 8))
    shifted = torch.cat((x.new_zeros(1), down.flatten()))[1:].view_as(down)
    tensors = [x.t().contiguous().t(), gate.t().contiguous().t(), torch.cat((up, up), 1)[:, :16], shifted]
    check([one.requires_grad_() for one in tensors])


def test_both_weights_may_be_halves_of_one(no_way_out, device):
    x, gate, up, down = (one.detach() for one in draw(device, 20, 16, 24, 8))
    one, other = torch.cat((gate, up)).chunk(2)
    check([tensor.requires_grad_() for tensor in (x, one, other, down)])


def test_a_gradient_may_be_one_number_for_all(no_way_out, device):
    tensors = draw(device, 40, 8, 16, 8)
    gated_mlp(*tensors, "silu").sum().backward()
    exact = torch.autograd.grad(reference(*tensors, "silu").sum(), tensors)
    for one, other in zip(tensors, exact, strict=True):
        torch.testing.assert_close(one.grad, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_values_are_those_of_torch_and_nan_stays_nan(no_way_out, device, kind):
    values = [-3e4, -200.0, -20.0, -6.5, -5.5, -1e-3, 0.0, 1e-3, 5.5, 6.5, 20.0, 200.0, 3e4, 1.0, 2.0, torch.nan]
    gate, up = torch.zeros(16, 8, device=device), torch.zeros(16, 8, device=device)
    gate[:, 0], up[:, 1] = torch.tensor(values, device=device), 3.0
    x = torch.eye(8, device=device)[:2].sum(0, keepdim=True)
    hidden, activation, slopes = kernel.forward(x, gate, up, kind)
    leaf = gate[:, 0].clone().requires_grad_()
    wanted = KINDS[kind](leaf)
    torch.testing.assert_close(activation[0], wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(hidden[0], 3.0 * wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    both = kernel.backward(torch.ones(1, 8, device=device), torch.full((8, 16), 0.125, device=device), slopes, slopes)
    (slope,) = torch.autograd.grad(wanted.sum(), leaf)
    torch.testing.assert_close(both[0, :15], 3.0 * slope[:-1], rtol=1e-5, atol=3e-5)


def test_no_rows_are_no_work(no_way_out, device):
    tensors = draw(device, 0, 8, 16, 8)
    gated_mlp(*tensors, "silu").sum().backward()
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in tensors)


def test_nothing_is_written_beyond_the_end(device, monkeypatch):
    x, gate, up, down = (one.detach() for one in draw(device, 35, 8, 40, 8))
    found, new_empty = [], torch.Tensor.new_empty

    def room(like, *shape, **given):
        if shape == (0,):  # Triton's own
            return new_empty(like, *shape, **given)
        shape = shape or like.shape
        memory = torch.full((shape[0] + 40, shape[1]), 7.0, device=like.device, dtype=like.dtype)
        found.append(memory[shape[0] :])
        return memory[: shape[0]]

    monkeypatch.setattr(torch, "empty_like", room)
    monkeypatch.setattr(torch.Tensor, "new_empty", room)
    _, activation, slopes = kernel.forward(x, gate, up, "silu")
    kernel.backward(torch.ones(35, 8, device=device), down, activation, slopes)
    assert len(found) == 4 and all((memory == 7).all() for memory in found)


def test_the_gradients_of_both_layers_lie_side_by_side(device):
    """Each keeps to its half where the last tile is not full."""
    x, gate, up, down = (one.detach() for one in draw(device, 35, 8, 40, 8))
    _, activation, slopes = kernel.forward(x, gate, up, "silu")
    dy = torch.ones(35, 8, device=device)
    dgate, dup = kernel.backward(dy, down, activation, slopes).chunk(2, dim=1)
    torch.testing.assert_close(dgate, (dy @ down) * slopes, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dup, (dy @ down) * activation, rtol=1e-5, atol=1e-6)


def test_the_same_input_gives_the_same_bits(device):
    tensors = draw(device, 70, 8, 40, 8)
    assert all(map(torch.equal, results_of(gated_mlp, tensors, "silu"), results_of(gated_mlp, tensors, "silu")))


def test_less_is_kept_for_the_backward_than_torch_keeps(no_way_out, device):
    def kept_by(function):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: kept.setdefault(one.data_ptr(), one), lambda one: one
        ):
            y = function(*draw(device, 40, 8, 64, 8), "silu")
        return y, sum(one.numel() for one in kept.values())

    (_, ours), (_, theirs) = kept_by(gated_mlp), kept_by(reference)
    assert ours == theirs - 40 * 64


def test_an_unknown_kind_is_refused_with_the_choices(device):
    with pytest.raises(ValueError, match=r"'swish' is no activation.*gelu, gelu_tanh, silu, relu"):
        gated_mlp(*draw(device, 1, 8, 8, 8), "swish")


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
    assert all(map(torch.equal, results_of(gated_mlp, tensors, "silu"), results_of(reference, tensors, "silu")))


def test_a_factor_that_is_broadcast_is_left_to_torch(device):
    x, gate, up, down = draw(device, 3, 8, 16, 8)
    tensors = x, gate, up.detach()[:1].requires_grad_(), down
    assert not kernel.is_offered(*tensors)
    assert torch.equal(gated_mlp(*tensors, "silu"), reference(*tensors, "silu"))


def test_layers_of_two_dtypes_raise_what_torch_raises(device):
    x, *layers = draw(device, 3, 8, 8, 8)
    with pytest.raises(RuntimeError, match="dtype"):
        gated_mlp(x.half(), *layers, "silu")


@pytest.mark.parametrize("of", range(4))
def test_a_second_derivative_is_refused_and_not_left_out(device, of):
    tensors = draw(device, 3, 8, 8, 8)
    (gradient,) = torch.autograd.grad(gated_mlp(*tensors, "silu").square().sum(), tensors[of], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_operators_are_what_torch_asks_of_them(device):
    x, gate, up, down = (one.detach() for one in draw(device, 35, 8, 40, 8))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    _, activation, slopes = kernel.forward(x, gate, up, "silu")
    both = kernel.backward(torch.ones_like(x), down, activation, slopes)
    torch.library.opcheck(kernel.forward, (x, gate, up, "gelu"), test_utils=checks)
    torch.library.opcheck(kernel.backward, (torch.ones_like(x), down, activation, slopes), test_utils=checks)
    torch.library.opcheck(kernel.product_of_both, (both, gate, up), test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_keeps_it_whole(no_way_out, device):
    tensors = draw(device, 35, 8, 40, 8)
    compiled = torch.compile(gated_mlp, fullgraph=True, backend="aot_eager")
    for one, other in zip(results_of(compiled, tensors, "silu"), results_of(gated_mlp, tensors, "silu"), strict=True):
        torch.testing.assert_close(one, other)
