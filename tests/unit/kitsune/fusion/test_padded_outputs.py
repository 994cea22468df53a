"""Rows of large outputs that begin at multiples of 16 bytes: which layers, the same numbers, and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.fusion.padded_outputs import backward, pad_outputs, padded_linear

CLASSES = 50


class Model(nn.Module):
    """Logits of (2, 3) tokens, as `after` gives them."""

    def __init__(self, classes=CLASSES, bias=False, after=lambda y: y) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(classes, 16), nn.Linear(16, classes, bias=bias)
        self.after = after

    def forward(self, ids):
        return self.after(self.head(torch.tanh(self.embedding(ids))))


IDS = torch.arange(6).view(2, 3)


def compiled(model, found, is_wanted=lambda _: True):
    """The model through AOTAutograd, with the number of padded layers appended to `found`."""

    def backend(graph, inputs):
        found.append(pad_outputs(graph, is_wanted))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend)


def padded_in(model, *inputs, **options):
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        compiled(model, found, **options)(*inputs)
    return sum(found)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_a_linear_layer_in_padded_rows(dtype, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 16, dtype=dtype), torch.randn(CLASSES, 16, dtype=dtype)
    given = [each.requires_grad_() for each in (x, weight, *([torch.randn(CLASSES, dtype=dtype)] if bias else []))]
    y, plain = padded_linear(*given, *([] if bias else [None])), F.linear(*given)
    assert y.stride(-1) == 1 and y.stride(-2) * y.element_size() % 128 == 0
    assert y.untyped_storage().nbytes() >= 6 * y.stride(-2) * y.element_size(), "the padding of the last row is there"
    torch.testing.assert_close(y, plain)
    slopes = torch.randn_like(plain)
    for dy in (slopes, torch.full_like(y, torch.nan).copy_(slopes)):
        found, wanted = torch.autograd.grad(y, given, dy, retain_graph=True), torch.autograd.grad(plain, given, slopes)
        plain = F.linear(*given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_what_is_in_the_gaps_is_not_read():
    x, weight = torch.randn(6, 16), torch.randn(CLASSES, 16)
    memory = torch.full((6, 64), torch.nan)
    dy = memory[:, :CLASSES].copy_(torch.randn(6, CLASSES))
    dx, dweight, dbias = backward(dy, x, weight, True, True, True)
    assert torch.equal(dbias, dy.contiguous().sum(0))
    torch.testing.assert_close(dx, dy.contiguous() @ weight)
    torch.testing.assert_close(dweight, dy.contiguous().t() @ x)


def test_the_operators_are_what_torch_asks_of_them():
    x, weight, bias = torch.randn(2, 3, 16), torch.randn(CLASSES, 16), torch.randn(CLASSES)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = [each.requires_grad_() for each in (x, weight, bias)]
    torch.library.opcheck(padded_linear, tuple(given), test_utils=checks)
    dy = torch.randn(2, 3, CLASSES)
    plain = [each.detach() for each in (dy, x, weight)]
    torch.library.opcheck(backward, (*plain, True, True, False), test_utils=checks)
    torch.library.opcheck(backward, (*plain, False, True, True), test_utils=checks)


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y,
        lambda y: y.view(-1, CLASSES),
        lambda y: y.reshape(3, 2, CLASSES),
        lambda y: {"logits": (y.flatten(0, 1),)},
        lambda y: (y, torch.ones(3)),
    ],
)
def test_layers_whose_rows_leave_the_graph_are_padded(after):
    assert padded_in(Model(after=after), IDS) == 1


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y.float(),
        lambda y: y.flatten(),
        lambda y: y.transpose(0, 1),
        lambda y: y * 2,
        lambda y: (y, y.view(-1, CLASSES)),
        lambda y: (y.view(-1, CLASSES), y.sum()),
    ],
)
def test_others_stay_as_they_are(after):
    assert padded_in(Model(after=after), IDS) == 0


def test_rows_that_are_aligned_or_too_short_or_in_fp32_stay_as_they_are():
    assert padded_in(Model(classes=64), IDS) == 0
    assert padded_in(Model(), IDS, is_wanted=lambda value: value.numel() > 300) == 0
    found = []
    compiled(Model(), found)(IDS)
    assert found == [0]


@pytest.mark.parametrize("bias", [False, True])
def test_a_compiled_model_has_the_same_outputs_and_gradients(bias):
    torch.manual_seed(0)
    model = Model(bias=bias)
    found, results = [], []
    for forward in (model, compiled(model, found)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(IDS)
        F.cross_entropy(y.float().view(-1, CLASSES), IDS.view(-1)).backward()
        results.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    assert found == [1]
    assert results[0][0].is_contiguous() and not results[1][0].is_contiguous()
    for plain, own in zip(*results, strict=True):
        assert own.dtype == plain.dtype
        torch.testing.assert_close(own, plain, rtol=2e-2, atol=2e-3)
