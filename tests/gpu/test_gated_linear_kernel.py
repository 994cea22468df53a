"""The gated block of a transformer on a GPU: real shapes, streams, CUDA graphs, torch.compile."""

import pytest
import torch

from kitsune.kernels import gated_linear as kernel
from kitsune.kernels import gated_linear_hopper
from kitsune.kernels.bias_activation import KINDS
from kitsune.kernels.gated_linear import gated_mlp, reference
from kitsune.kernels.products import HOPPER
from tests.kernel_checks import check_current_stream, check_graph, spied, takes_gluon

#: (rows, hidden, width within the block)
SHAPES = {
    "Llama 125M": (8192, 768, 2048),
    "Llama 1B": (4096, 2048, 8192),
    "TinyLlama": (2048, 2048, 5632),
    "one row": (1, 768, 2048),
    "no whole tile": (1000, 200, 328),
    "no whole tile, several a program": (5003, 200, 1000),
}
RAGGED = [shape for name, shape in SHAPES.items() if name.startswith("no whole tile")]
#: Of the norm of what is compared.
TOLERANCES = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (HOPPER, 0),
    reason="the kernels need the tensor memory accelerator",
)


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch):
    """The reference is out of reach: what is computed is computed by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def draw(device, rows, hidden, width, dtype):
    """((x, gate, up, down), dy)."""
    torch.manual_seed(0)
    shapes = (rows, hidden), (width, hidden), (width, hidden), (hidden, width), (rows, hidden)
    x, gate, up, down, dy = (torch.randn(shape, device=device) for shape in shapes)
    drawn = x, gate / hidden**0.5, up / hidden**0.5, down / width**0.5, dy
    *tensors, dy = (tensor.to(dtype) for tensor in drawn)
    return tensors, dy


def step_of(function, kind="silu"):
    def step(*given):
        *tensors, dy = given
        leaves = [one.detach().requires_grad_() for one in tensors]
        y = function(*leaves, kind)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return step


def error(ours, exact):
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def check(device, shape, dtype, kind):
    tensors, dy = draw(device, *shape, dtype)
    ours = step_of(gated_mlp, kind)(*tensors, dy)
    exact = step_of(reference, kind)(*(one.float() for one in tensors), dy.float())
    for one, right in zip(ours, exact, strict=True):
        assert (one.dtype, one.shape) == (dtype, right.shape)
        assert error(one, right) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_what_the_reference_does(device, shape, dtype):
    check(device, shape, dtype, "silu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_reference_does(device, kind):
    check(device, SHAPES["TinyLlama"], torch.bfloat16, kind)


def test_it_is_about_as_near_to_the_truth_as_torch(device):
    tensors, dy = draw(device, *SHAPES["Llama 125M"], torch.bfloat16)
    ours, theirs = (step_of(function)(*tensors, dy) for function in (gated_mlp, reference))
    exact = step_of(reference)(*(one.float() for one in tensors), dy.float())
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert error(one, right) < 1.2 * error(other, right) + 1e-5


@pytest.mark.skipif(not takes_gluon(), reason="the kernels in Gluon are for Hopper with Triton 3.6")
def test_large_results_in_bf16_are_computed_in_gluon(device, monkeypatch):
    """Of one step of products each: 552 and 276 tiles."""
    (x, gate, up, down), dy = draw(device, 128 * 46, 8, 768, torch.bfloat16)
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "takes_turns", lambda *_: False)
        wanted = kernel.forward(x, gate, up, "silu")
        wanted += (kernel.backward(dy, down, *wanted[1:]),)
    launches = spied(monkeypatch, gated_linear_hopper, "launch")
    got = kernel.forward(x, gate, up, "silu")
    got += (kernel.backward(dy, down, *got[1:]),)
    assert len(launches) == 2
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < 3e-3


@pytest.mark.parametrize("shape", RAGGED)
def test_what_is_beyond_the_last_row_is_left_alone(device, shape):
    (x, gate, up, down), dy = draw(device, *shape, torch.bfloat16)
    rows = len(x)
    results = kernel.forward(x, gate, up, "silu")
    twice = torch.cat((x, x))
    for whole, half in zip(kernel.forward(twice, gate, up, "silu"), results, strict=True):
        assert torch.equal(whole[:rows], half) and torch.equal(whole[rows:], half)
    _, activation, slopes = results
    both = kernel.backward(dy, down, activation, slopes)
    doubled = (torch.cat((one, one)) for one in (activation, slopes))
    whole = kernel.backward(torch.cat((dy, dy)), down, *doubled)
    assert torch.equal(whole[:rows], both) and torch.equal(whole[rows:], both)


@pytest.mark.parametrize("shape", RAGGED)
def test_the_gradients_of_both_layers_keep_to_their_halves(device, shape):
    """Their last tile is not full, and rows of the one continue in the other."""
    (x, gate, up, down), dy = draw(device, *shape, torch.bfloat16)
    _, activation, slopes = kernel.forward(x, gate, up, "silu")
    dgate, dup = kernel.backward(dy, down, activation, slopes).chunk(2, dim=1)
    dhidden = dy.float() @ down.float()
    assert error(dgate, dhidden * slopes.float()) < 3e-3
    assert error(dup, dhidden * activation.float()) < 3e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_input_gives_the_same_bits(device, shape):
    (x, gate, up, down), dy = draw(device, *shape, torch.bfloat16)

    def once():
        results = kernel.forward(x, gate, up, "silu")
        both = kernel.backward(dy, down, *results[1:])
        return *results, both, kernel.product_of_both(both, gate, up)

    first = once()
    for _ in range(5):
        assert all(map(torch.equal, once(), first))


def test_it_is_launched_on_the_current_stream(device):
    tensors, dy = draw(device, *SHAPES["TinyLlama"], torch.bfloat16)
    check_current_stream(step_of(gated_mlp), (*tensors, dy))


def test_it_is_captured_and_replayed_with_other_values(device):
    (tensors, dy), (others, other) = (draw(device, *SHAPES["TinyLlama"], torch.bfloat16) for _ in range(2))
    check_graph(step_of(gated_mlp), (*tensors, dy), (*(one * 0.5 for one in others), other * 2))


def test_a_compiled_model_has_the_gradients_of_an_eager_one(device):
    tensors, dy = draw(device, *SHAPES["Llama 125M"], torch.bfloat16)
    eager, compiled = step_of(gated_mlp), step_of(torch.compile(gated_mlp, fullgraph=True))
    for one, other in zip(compiled(*tensors, dy), eager(*tensors, dy), strict=True):
        assert error(one, other) < 5e-3


def test_under_autocast_a_compiled_model_has_gradients_in_fp32(device):
    (x, *layers), dy = draw(device, *SHAPES["TinyLlama"], torch.bfloat16)
    leaves = [one.float().requires_grad_() for one in layers]

    def function(x, gate, up, down):
        return gated_mlp(x, gate.bfloat16(), up.bfloat16(), down.bfloat16(), "silu")

    with torch.autocast("cuda", torch.bfloat16):
        y = torch.compile(function, fullgraph=True)(x, *leaves)
    ours = torch.autograd.grad(y, leaves, dy)
    exact = step_of(reference)(x.float(), *leaves, dy.float())[2:]
    for one, right in zip(ours, exact, strict=True):
        assert one.dtype == torch.float32 and error(one, right) < TOLERANCES[torch.bfloat16]


def test_gradients_in_half_precision_are_accumulated_in_the_weights(device):
    """Those of gate and up are halves of one tensor: a second backward adds to each in place."""
    tensors, dy = draw(device, *SHAPES["TinyLlama"], torch.bfloat16)
    leaves = [one.requires_grad_() for one in tensors]
    for _ in range(2):
        gated_mlp(*leaves, "silu").backward(dy)
    once = step_of(gated_mlp)(*tensors, dy)[1:]
    for leaf, gradient in zip(leaves, once, strict=True):
        assert torch.equal(leaf.grad, 2 * gradient)
