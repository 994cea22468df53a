"""Checkpoints in a loop of the user's own: less is kept, and the gradients are the same to the bit."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune.errors import SettingsError, UnfitError
from kitsune.memory import AdaptiveCheckpointing, SelectiveGradientCheckpointing

WIDTH, ROWS, BLOCKS = 16, 64, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x, scale=1.0):
        return x + scale * self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


class Kept:
    """Bytes that the forward within it saves for its backward. Checkpoints save theirs by hooks of their own."""

    def __init__(self):
        self.found = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        self.found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def count(self):
        return sum(self.found.values())


def gradients(model, run):
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    with Kept() as kept:
        loss = run(x).square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()], kept.count


def test_blocks_that_are_not_important_are_checkpoints(model):
    selective = SelectiveGradientCheckpointing(importance_threshold=0.7)
    selective.update_importance("layers.4", 0.9)
    selective.update_importance("layers.3", 0.7)
    selective.update_importance("layers.2", 0.6)
    assert selective.checkpoints(model) == ["layers.0", "layers.1", "layers.2"]
    plain, all_bytes = gradients(model, model)
    with selective.applied(model) as names:
        found, kept_bytes = gradients(model, model)
    assert names == ["layers.0", "layers.1", "layers.2"]
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert kept_bytes < all_bytes - 3 * 4 * 4 * WIDTH * ROWS
    assert gradients(model, model)[1] == all_bytes
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_all_blocks_are_checkpoints_until_one_is_important(model):
    assert len(SelectiveGradientCheckpointing().checkpoints(model)) == BLOCKS
    assert SelectiveGradientCheckpointing(0.0).checkpoints(model) == []


def test_what_makes_no_sense_is_refused(model):
    selective = SelectiveGradientCheckpointing()
    for wrong in (-0.1, 1.1, "high", True, float("nan")):
        with pytest.raises(SettingsError, match="from 0 to 1"):
            SelectiveGradientCheckpointing(wrong)
        with pytest.raises(SettingsError, match="importance of layers"):
            selective.update_importance("layers.0", wrong)
    selective.update_importance("layer.0", 0.5)
    with pytest.raises(SettingsError, match=r"'layer.0' is no block that the model repeats; there are layers.0, "):
        selective.checkpoints(model)
    with pytest.raises(UnfitError, match="repeats no block"):
        SelectiveGradientCheckpointing().checkpoints(nn.Linear(2, 2))


#: What a block keeps: its hidden activations before and after the GELU, the mask of its dropout, the sum of weights.
def block_bytes(model):
    adaptive = AdaptiveCheckpointing("1GiB")
    gradients(model, lambda x: adaptive.forward(model, x))
    return adaptive.block_bytes


@pytest.mark.parametrize("kept", [1, 2, 4, 5])
def test_as_many_blocks_are_kept_as_fit(model, kept):
    adaptive = AdaptiveCheckpointing(kept * block_bytes(model) + 1)
    plain, all_bytes = gradients(model, model)
    found, kept_bytes = gradients(model, lambda x: adaptive.forward(model, x))
    assert adaptive.kept == kept
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    saved = (BLOCKS - kept) * block_bytes(model)
    assert kept_bytes <= all_bytes - 0.9 * saved
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_the_first_block_is_kept_even_where_it_does_not_fit(model):
    adaptive = AdaptiveCheckpointing(1)
    gradients(model, lambda x: adaptive.forward(model, x))
    assert adaptive.kept == 1


def test_named_inputs_reach_the_model(model):
    x = torch.randn(ROWS, WIDTH)
    adaptive = AdaptiveCheckpointing("1GiB")
    torch.manual_seed(3)
    expected = model(x, scale=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(adaptive.forward(model, x, scale=0.5), expected, rtol=0, atol=0)


def test_an_error_in_the_forward_leaves_the_model_as_it_was(model):
    adaptive, selective = AdaptiveCheckpointing("1GiB"), SelectiveGradientCheckpointing()
    with pytest.raises(RuntimeError):
        adaptive.forward(model, torch.randn(ROWS, WIDTH + 1))
    with contextlib.suppress(RuntimeError), selective.applied(model):
        model(torch.randn(ROWS, WIDTH + 1))
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_on_a_cpu_a_limit_is_needed(model):
    with pytest.raises(UnfitError, match="give AdaptiveCheckpointing a memory_limit"):
        AdaptiveCheckpointing().forward(model, torch.randn(ROWS, WIDTH))
    with pytest.raises(SettingsError, match="memory_limit"):
        AdaptiveCheckpointing("much")
