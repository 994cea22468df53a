"""Which outputs of a model may have gaps between their rows: large ones that it returns and keeps nowhere else."""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.autograd import half_outputs, sole_outputs
from kitsune.autograd.half_outputs import gradient_like
from kitsune.autograd.sole_outputs import SoleOutputs, has_unaligned_head
from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.techniques.compile import Inductor

CLASSES = 50
IDS = torch.arange(6).view(2, 3)
KIND = torch.empty(6, CLASSES)


@dataclass
class Opaque:
    logits: Any


class Model(nn.Module):
    """`after` gets the model and its logits, and gives what it returns."""

    def __init__(self, after=lambda model, logits: logits) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=False)
        self.after = after
        self.kept = []

    def forward(self, ids):
        return self.after(self, self.head(torch.tanh(self.embedding(ids))))


def keep(model, logits):
    model.kept.append(logits)
    return logits


def keep_a_view(model, logits):
    model.kept.append(logits.view(-1, CLASSES)[1:])
    return logits


def keep_another_of_the_size(model, logits):
    model.kept.append(logits.detach() * 2)
    return logits


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(half_outputs, "LEAST_BYTES", 0)


def dispatched(model, forward, sole):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    contexts = [lambda: torch.autocast("cpu", torch.bfloat16)]
    device = torch.device("cpu")
    options = {"capture": False, "forward_contexts": contexts, "single_outputs": True, "sole_outputs": sole}
    return SegmentedForward(model, optimizer, forward, model, device, **options)


@pytest.mark.parametrize(
    ("after", "is_sole"),
    [
        (lambda _, logits: logits, True),
        (lambda _, logits: {"logits": logits.view(-1, CLASSES), "loss": logits.float().sum()}, True),
        (keep, False),
        (keep_a_view, False),
        (keep_another_of_the_size, False),
        (lambda _, logits: Opaque(logits), False),
        (lambda _, logits: logits.float(), False),
    ],
    ids=["returned", "in a dictionary", "kept", "kept as a view", "another is kept", "in an object", "cast"],
)
def test_they_are_learned_from_the_first_forward_as_given(after, is_sole):
    model, sole, calls = Model(after), SoleOutputs(), []

    def planned(ids):
        calls.append(ids)
        return model(ids)

    forward = dispatched(model, planned, sole)
    first = forward(IDS)
    assert sole.is_known and not calls
    assert (KIND in sole) == is_sole
    assert KIND[:5] not in sole
    forward(IDS)
    assert len(calls) == 1
    if isinstance(first, torch.Tensor):
        first.sum().backward()


def test_what_was_alive_before_the_forward_does_not_count():
    """Outputs of another model, or of this one under another plan."""
    others = Model()(IDS).to(torch.bfloat16)
    sole = SoleOutputs()
    model = Model()
    dispatched(model, model, sole)(IDS)
    assert others.numel() == KIND.numel()
    assert KIND in sole


def test_a_model_has_such_rows_if_a_weight_is_of_many_classes(monkeypatch):
    assert not has_unaligned_head(Model())
    monkeypatch.setattr(sole_outputs, "LEAST_CLASSES", CLASSES)
    assert has_unaligned_head(Model())
    assert not has_unaligned_head(nn.Linear(16, 64))
    assert not has_unaligned_head(nn.Embedding(CLASSES, 16))


class Every:
    """All outputs are sole ones."""

    def __contains__(self, output):
        return True


def broken(model, logits):
    torch._dynamo.graph_break()
    return logits.view(-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize(("after", "is_padded"), [(lambda _, logits: logits, True), (broken, False)])
def test_rows_are_padded_where_the_forward_is_one_graph(after, is_padded):
    torch._dynamo.reset()
    model = Model(after)
    backend = Inductor({}, {}, may_run_twice=True, sole_outputs=Every())
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(model, backend=backend)(IDS)
    assert y.is_contiguous() != is_padded


class Layouts(TorchDispatchMode):
    """Of the gradients that padded layers are called with."""

    def __init__(self):
        super().__init__()
        self.strides = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.kitsune.padded_linear_backward.default:
            self.strides.append(args[0].stride())
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_gradients_are_read_with_the_gaps_of_the_rows():
    """torch before 2.13 would have copied them to dense rows first."""
    torch._dynamo.reset()
    functorch = importlib.import_module("torch._functorch.config")
    model = Model()
    backend = Inductor({}, {}, may_run_twice=True, sole_outputs=Every())
    with functorch.patch(guess_tangent_strides_as_outputs=False), torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(model, backend=backend)(IDS)
        assert functorch.guess_tangent_strides_as_outputs is False
    gradient = gradient_like(y, torch.ones_like)
    with Layouts() as seen:
        y.backward(gradient)
    assert seen.strides == [y.stride()] and y.stride() == gradient.stride()
