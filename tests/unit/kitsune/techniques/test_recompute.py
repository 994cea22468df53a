"""recompute: less is kept for the backward, and the numbers are those of the step that keeps everything."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as new_spectral_norm

from kitsune import Plan, TrainStep
from kitsune.knobs import KNOBS, clashes
from kitsune.techniques.recompute import checkpoint_of, repeated_blocks, replaced
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
        pytest.param("blocks-keep-attention", 0.5, marks=pytest.mark.minutes),
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


class Drawing(nn.Module):
    """A block without biases: the sum of each weight times its gradient is the loss times the count of weights."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw, self.linear = draw, nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return self.draw(torch.relu(self.linear(x)))


@pytest.mark.parametrize("choice", BLOCKS)
@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5), lambda x: x * torch.rand_like(x)])
def test_what_a_function_draws_is_drawn_again(draw, choice):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Drawing(draw) for _ in range(3))), torch.randn(8, WIDTH)
    with TrainStep(model, lambda h, _: h.sum(), torch.optim.SGD(model.parameters(), 0.0), made(choice)) as step:
        for _ in range(3):
            loss = step(x, x).item()
            found = sum((each * each.grad).sum().item() for each in model.parameters())
            assert found == pytest.approx(3 * loss, rel=1e-4)


def made(choice, **others):
    return Plan.by_hand(recompute=choice, **others)


def reported(model, plan, x=None):
    with TrainStep(model, lambda h, _: h.sum(), sgd(model.parameters()), plan) as step:
        if x is not None:
            step(x, x)
        return step.report


@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5), nn.Dropout(0.5)])
def test_a_share_is_declined_where_the_graph_draws(draw):
    torch._dynamo.reset()
    report = reported(nn.Sequential(Drawing(draw)), made("keep-50", compile="default"), torch.randn(2, WIDTH))
    assert "pytorch#190758" in report.declined["recompute"]
    assert report.applied == {"compile": "default"}


@pytest.mark.parametrize("choice", ["blocks", pytest.param("blocks-keep-attention", marks=pytest.mark.minutes)])
def test_a_compiled_step_is_compiled_once(choice, monkeypatch):
    torch._dynamo.reset()
    compiled, given = [], torch._inductor.compile
    monkeypatch.setattr(
        torch._inductor, "compile", lambda *found, **options: compiled.append(found) or given(*found, **options)
    )
    model, x = Stack(), torch.randn(2, 8, WIDTH)
    with TrainStep(model, F.mse_loss, sgd(model.parameters()), made(choice, compile="default")) as step:
        for _ in range(12):
            step(x, torch.zeros(2))
    assert len(compiled) == 1


@pytest.mark.parametrize("choice", BLOCKS)
def test_a_backend_of_attention_holds_when_it_is_computed_again(choice):
    torch.testing.assert_close(trained(attention="math", recompute=choice)[:2], trained(attention="math")[:2])


def test_where_it_has_nothing_to_save_or_would_count_twice_it_is_declined():
    normed = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    spectral = [nn.Sequential(make(nn.Linear(4, 4))) for make in (new_spectral_norm, old_spectral_norm) for _ in "ab"]
    for blocks in ([nn.Linear(4, 4), nn.Linear(4, 4)], normed, spectral):
        assert "repeats no block" in reported(nn.Sequential(*blocks), made("blocks")).declined["recompute"]


def test_blocks_are_the_outermost_that_repeat_each_once():
    stack = Stack()
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), stack)) == list(stack.blocks)
    nested = nn.ModuleList([nn.Sequential(Block(0.0), Block(0.0)) for _ in range(2)])
    assert repeated_blocks(nn.Sequential(nested)) == list(nested)
    shared = Block(0.0)
    assert repeated_blocks(nn.Sequential(shared, shared)) == [shared]


def test_a_forward_that_the_user_has_replaced_is_used_and_comes_back():
    block = Stack().blocks[0]
    block.forward = own = lambda x, *, debug: x * debug
    with replaced([(block, checkpoint_of(block.forward, None, ()))]):
        assert torch.equal(block(torch.ones(2, requires_grad=True), debug=2), torch.full((2,), 2.0))
        assert block.forward is not own
    assert block.forward is own


@pytest.mark.parametrize("choice", BLOCKS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoders_of_transformers_append_nothing_to_their_cache_again(choice, attention):
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    found = []
    for plan in (None, made(choice)):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=64, attn_implementation=attention, **options)
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.randint(64, (2, 16))
        mask = torch.ones_like(tokens)
        mask[:, :4] = 0
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
        with TrainStep(model, None, sgd(model.parameters()), plan) as step:
            losses = [step(batch).item() for _ in range(2)]
            assert not step.report.declined
        found.append((losses, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("choice", [choice for choice in KNOBS["recompute"].choices if choice != "off"])
def test_graphs_of_inductors_own_are_excluded(choice):
    assert next(clashes({"recompute": choice, "compile": "reduce-overhead"}), None) is not None
    assert next(clashes({"recompute": choice, "compile": "default"}), None) is None
