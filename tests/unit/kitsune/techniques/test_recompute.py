"""recompute: less is kept for the backward, and the numbers are those of the step that keeps everything."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune import Plan, TrainStep
from kitsune.knobs import KNOBS, clashes
from kitsune.techniques.recompute import checkpointed, has_dropout, repeated_blocks
from tests.step_cases import sgd

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor, at its first import

BLOCKS = ("blocks-keep-attention", "blocks")
WIDTH = 32


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        query, key, value = self.heads(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + scale * self.dropout(self.mlp(x))


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.mean((1, 2))


def trained(dropout=0.0, **knobs):
    """Losses, gradients, and the bytes that the forward kept for the backward beside parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, kept = Stack(dropout), {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = torch.randn(4, 16, WIDTH), torch.randn(4)
    with TrainStep(model, F.mse_loss, sgd(model.parameters()), Plan.by_hand(**knobs)) as step:
        losses = []
        for _ in range(3):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                losses.append(step(x, y).item())
        assert step.report.applied.get("recompute") == knobs.get("recompute")
        assert not any("forward" in module.__dict__ for module in model.modules())
    return losses, [parameter.grad for parameter in model.parameters()], sum(kept.values())


@functools.cache
def plain(compiled):
    return trained(compile=compiled)


@pytest.mark.parametrize(
    ("choice", "most"),
    [
        pytest.param("keep-75", 0.8, marks=pytest.mark.minutes),
        ("keep-50", 0.6),
        pytest.param("keep-30", 0.4, marks=pytest.mark.minutes),
        ("blocks-keep-attention", 0.5),
        pytest.param("blocks", 0.4, marks=pytest.mark.minutes),
    ],
)
def test_a_compiled_step_keeps_less_and_computes_the_same(choice, most):
    found = trained(compile="default", recompute=choice)
    torch.testing.assert_close(found[:2], plain("default")[:2])
    assert found[2] < most * plain("default")[2]


@pytest.mark.parametrize("choice", BLOCKS)
def test_blocks_keep_less_and_compute_the_same(choice):
    found = trained(recompute=choice)
    torch.testing.assert_close(found[:2], plain("off")[:2])
    assert found[2] < 0.5 * plain("off")[2]


@pytest.mark.minutes
def test_blocks_that_keep_attention_keep_more():
    keeping, keeping_less = (trained(compile="default", recompute=choice)[2] for choice in BLOCKS)
    assert keeping > keeping_less


@pytest.mark.parametrize("choice", BLOCKS)
def test_a_dropout_is_computed_again_with_the_mask_that_it_had(choice):
    given, found = trained(0.5), trained(0.5, recompute=choice)
    assert found[0] == given[0]
    torch.testing.assert_close(found[1], given[1])


def declined(model, **knobs):
    with TrainStep(model, F.mse_loss, sgd(model.parameters()), Plan.by_hand(**knobs)) as step:
        return step.report.declined["recompute"]


def test_where_it_would_be_wrong_or_has_nothing_to_save_it_is_declined():
    assert "another mask" in declined(Stack(0.5), compile="default", recompute="keep-50")
    assert "no two modules" in declined(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), recompute="blocks")
    normed = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    assert "batch norm" in declined(nn.Sequential(*normed), recompute="blocks")


def test_a_dropout_that_is_off_is_none():
    assert has_dropout(Stack(0.5))
    assert not has_dropout(Stack(0.5).eval())
    assert not has_dropout(Stack(0.0))


def test_blocks_are_the_outermost_that_repeat():
    stack = Stack()
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), stack)) == list(stack.blocks)
    nested = nn.ModuleList([nn.Sequential(Block(0.0), Block(0.0)) for _ in range(2)])
    assert repeated_blocks(nn.Sequential(nested)) == list(nested)


def test_a_forward_that_the_user_has_replaced_is_used_and_comes_back():
    block = Stack().blocks[0]
    block.forward = own = lambda x: x * 2
    with checkpointed([block], None):
        assert torch.equal(block(torch.ones(2, requires_grad=True)), torch.full((2,), 2.0))
        assert block.forward is not own
    assert block.forward is own


@pytest.mark.parametrize("choice", [choice for choice in KNOBS["recompute"].choices if choice != "off"])
def test_graphs_of_inductors_own_are_excluded(choice):
    assert next(clashes({"recompute": choice, "compile": "reduce-overhead"}), None) is not None
    assert next(clashes({"recompute": choice, "compile": "default"}), None) is None
