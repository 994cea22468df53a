"""Two linear layers with an activation between them on a GPU: real shapes, streams, CUDA graphs, torch.compile."""

import pytest
import torch

from kitsune.kernels import linear_activation as kernel
from kitsune.kernels import linear_activation_hopper
from kitsune.kernels.bias_activation import KINDS
from kitsune.kernels.linear_activation import mlp, reference
from kitsune.kernels.products import HOPPER
from tests.kernel_checks import check_current_stream, check_graph, spied, takes_gluon

#: (rows, hidden, width within the block)
SHAPES = {
    "ViT-B/16": (64 * 197, 768, 3072),
    "GPT-2": (4096, 768, 3072),
    "BERT-base": (2048, 768, 3072),
    "BERT-large": (2048, 1024, 4096),
    "one row": (1, 768, 3072),
    "no whole tile": (1000, 200, 328),
    "no whole tile, several a program": (9003, 200, 1000),
}
RAGGED = [shape for name, shape in SHAPES.items() if name.startswith("no whole tile")]
#: Of the norm of what is compared.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (HOPPER, 0),
    reason="the kernels need the tensor memory accelerator",
)


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch):
    """The reference is out of reach: what is computed is computed by the kernels."""
    monkeypatch.setattr(kernel, "reference", None)


def draw(device, rows, hidden, width, dtype):
    """((x, w1, b1, w2, b2), dy)."""
    torch.manual_seed(0)
    shapes = (rows, hidden), (width, hidden), (width,), (hidden, width), (hidden,), (rows, hidden)
    x, w1, b1, w2, b2, dy = (torch.randn(shape, device=device) for shape in shapes)
    drawn = x, w1 / hidden**0.5, b1, w2 / width**0.5, b2, dy
    *tensors, dy = (tensor.to(dtype) for tensor in drawn)
    return tensors, dy


def step_of(function, kind="gelu"):
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
    ours = step_of(mlp, kind)(*tensors, dy)
    exact = step_of(reference, kind)(*(one.float() for one in tensors), dy.float())
    for one, right in zip(ours, exact, strict=True):
        assert (one.dtype, one.shape) == (dtype, right.shape)
        assert error(one, right) < TOLERANCES[dtype]


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_what_the_reference_does(device, shape, dtype):
    check(device, shape, dtype, "gelu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_its_reference_does(device, kind):
    check(device, SHAPES["BERT-base"], torch.bfloat16, kind)


def test_it_is_about_as_near_to_the_truth_as_torch(device):
    tensors, dy = draw(device, *SHAPES["GPT-2"], torch.bfloat16)
    ours, theirs = (step_of(function)(*tensors, dy) for function in (mlp, reference))
    exact = step_of(reference)(*(one.float() for one in tensors), dy.float())
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert error(one, right) < 1.2 * error(other, right) + 1e-5


@pytest.mark.skipif(not takes_gluon(), reason="the kernels in Gluon are for Hopper with Triton 3.6")
@pytest.mark.parametrize("has_bias", [True, False])
def test_large_results_in_bf16_are_computed_in_gluon(device, monkeypatch, has_bias):
    """Of one step of products each: 552 tiles."""
    (x, w1, b1, w2, _), dy = draw(device, 128 * 92, 8, 768, torch.bfloat16)
    bias = b1 if has_bias else None
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "takes_turns", lambda *_: False)
        wanted = kernel.forward(x, w1, bias, "gelu")
        wanted += kernel.backward(dy, w2, wanted[1])
    launches = spied(monkeypatch, linear_activation_hopper, "launch")
    got = kernel.forward(x, w1, bias, "gelu")
    got += kernel.backward(dy, w2, got[1])
    assert len(launches) == 2
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < 3e-3
    draws = draw(device, *SHAPES["one row"], torch.bfloat16), draw(device, 128 * 92, 8, 768, torch.float16)
    for (x, w1, b1, *_), _ in draws:
        kernel.forward(x, w1, b1, "gelu")
    assert len(launches) == 2


@pytest.mark.parametrize("name", ["GPT-2", "BERT-base", "one row"])
def test_transposed_weights_give_the_same_numbers(device, name):
    """As the Conv1D of GPT-2 holds them."""
    (x, w1, b1, w2, _), dy = draw(device, *SHAPES[name], torch.bfloat16)
    turned_w1, turned_w2 = (weight.t().contiguous().t() for weight in (w1, w2))
    a, slopes = kernel.forward(x, w1, b1, "gelu")
    wanted = a, slopes, *kernel.backward(dy, w2, slopes)
    got = *kernel.forward(x, turned_w1, b1, "gelu"), *kernel.backward(dy, turned_w2, slopes)
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < 3e-3


@pytest.mark.parametrize("shape", RAGGED)
def test_what_is_beyond_the_last_row_is_left_alone(device, shape):
    (x, w1, b1, w2, _), dy = draw(device, *shape, torch.bfloat16)
    rows = len(x)
    a, slopes = kernel.forward(x, w1, b1, "gelu")
    twice = torch.cat((x, x))
    for whole, half in zip(kernel.forward(twice, w1, b1, "gelu"), (a, slopes), strict=True):
        assert torch.equal(whole[:rows], half) and torch.equal(whole[rows:], half)
    dh, sums = kernel.backward(dy, w2, slopes)
    whole, _ = kernel.backward(torch.cat((dy, dy)), w2, torch.cat((slopes, slopes)))
    assert torch.equal(whole[:rows], dh) and torch.equal(whole[rows:], dh)
    torch.testing.assert_close(sums.sum(0), dh.float().sum(0), rtol=1e-2, atol=0.3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_input_gives_the_same_bits(device, shape):
    (x, w1, b1, w2, _), dy = draw(device, *shape, torch.bfloat16)
    a, slopes = kernel.forward(x, w1, b1, "gelu")
    dh, sums = kernel.backward(dy, w2, slopes)
    for _ in range(5):
        again = *kernel.forward(x, w1, b1, "gelu"), *kernel.backward(dy, w2, slopes)
        assert all(map(torch.equal, again, (a, slopes, dh, sums)))


def test_it_is_launched_on_the_current_stream(device):
    tensors, dy = draw(device, *SHAPES["BERT-base"], torch.bfloat16)
    check_current_stream(step_of(mlp), (*tensors, dy))


def test_it_is_captured_and_replayed_with_other_values(device):
    (tensors, dy), (others, other) = (draw(device, *SHAPES["BERT-base"], torch.bfloat16) for _ in range(2))
    check_graph(step_of(mlp), (*tensors, dy), (*(one * 0.5 for one in others), other * 2))


def test_a_compiled_model_has_the_gradients_of_an_eager_one(device):
    tensors, dy = draw(device, *SHAPES["GPT-2"], torch.bfloat16)
    eager, compiled = step_of(mlp), step_of(torch.compile(mlp, fullgraph=True))
    for one, other in zip(compiled(*tensors, dy), eager(*tensors, dy), strict=True):
        assert error(one, other) < 5e-3  # Inductor sums the gradients of biases in another order


def test_under_autocast_a_compiled_model_has_gradients_in_fp32(device):
    (x, *layers), dy = draw(device, *SHAPES["BERT-base"], torch.bfloat16)
    leaves = [one.float().requires_grad_() for one in layers]

    def function(x, w1, b1, w2, b2):
        return mlp(x, w1.bfloat16(), b1.bfloat16(), w2.bfloat16(), b2.bfloat16(), "gelu")

    with torch.autocast("cuda", torch.bfloat16):
        y = torch.compile(function, fullgraph=True)(x, *leaves)
    ours = torch.autograd.grad(y, leaves, dy)
    exact = step_of(reference)(x.float(), *leaves, dy.float())[2:]
    for one, right in zip(ours, exact, strict=True):
        assert one.dtype == torch.float32 and error(one, right) < TOLERANCES[torch.bfloat16]
