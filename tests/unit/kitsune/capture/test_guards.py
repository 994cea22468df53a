"""A watch sees what a captured graph has baked in change, and nothing else."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from kitsune.autograd.hooks import Hooks, first_hook
from kitsune.capture.guards import ModelGuard
from kitsune.capture.side_effects import SideEffects
from tests.step_cases import Convnet, adamw

X = torch.ones(2, 3, 8, 8)


def replace_weight(model, optimizer):
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


def new_storage(model, optimizer):
    model.last.weight.data = model.last.weight.data.clone()


def new_buffer(model, optimizer):
    model.norm.running_mean = model.norm.running_mean.clone()


def reset(tensor, change):
    """It begins where it was."""
    tensor.data = change(tensor.data)


def reload_optimizer(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = {
    "another mode": lambda model, optimizer: model.norm.eval(),
    "a forward hook": lambda model, optimizer: model.norm.register_forward_hook(print),
    "a forward pre-hook": lambda model, optimizer: model.register_forward_pre_hook(print),
    "a backward hook": lambda model, optimizer: model.last.register_full_backward_hook(print),
    "a gradient hook": lambda model, optimizer: model.last.weight.register_hook(print),
    "a hook after accumulation": lambda model, optimizer: model.last.weight.register_post_accumulate_grad_hook(print),
    "another layer": lambda model, optimizer: setattr(model, "last", nn.Linear(8, 4)),
    "one more layer": lambda model, optimizer: model.add_module("more", nn.Linear(8, 4)),
    "no layer": lambda model, optimizer: delattr(model, "last"),
    "a frozen layer": lambda model, optimizer: model.last.requires_grad_(False),
    "another parameter": replace_weight,
    "another storage": new_storage,
    "another buffer": new_buffer,
    "a shorter buffer": lambda model, optimizer: reset(model.norm.running_mean, lambda mean: mean[:4]),
    "a weight the other way round": lambda model, optimizer: reset(model.last.weight, torch.t),
    "a buffer of one number": lambda model, optimizer: reset(model.norm.running_mean, lambda mean: mean[:1].expand(8)),
    "another optimizer state": reload_optimizer,
}
NO_CHANGES = {
    "nothing": lambda model, optimizer: None,
    "weights in place": lambda model, optimizer: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "there and back": lambda model, optimizer: (model.eval(), model.train()),
    "gradients": lambda model, optimizer: optimizer.zero_grad(),
    "a step": lambda model, optimizer: optimizer.step(),
    "a hook that left again": lambda model, optimizer: model.register_forward_hook(print).remove(),
}


@pytest.fixture
def trained():
    model = Convnet()
    optimizer = adamw(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("change", CHANGES)
def test_it_sees(trained, change):
    watch = ModelGuard(*trained)
    assert watch.unchanged()
    CHANGES[change](*trained)
    assert not watch.unchanged()


def test_it_sees_a_hook_on_all_modules(trained):
    watch, hooks = ModelGuard(*trained), Hooks(trained[0])
    handle = register_module_forward_hook(print)
    try:
        assert not watch.unchanged()
        assert not hooks.unchanged()
    finally:
        handle.remove()
    assert watch.unchanged()
    assert hooks.unchanged()


@pytest.mark.parametrize("change", NO_CHANGES)
def test_it_does_not_mind(trained, change):
    watch = ModelGuard(*trained)
    NO_CHANGES[change](*trained)
    assert watch.unchanged()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_buffer_has_no_one_place(trained):
    model, optimizer = trained
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    watch = ModelGuard(model, optimizer)
    assert watch.unchanged()
    model.norm.eval()
    assert not watch.unchanged()


def test_the_optimizers_state_may_be_left_out(trained):
    watch = ModelGuard(*trained)
    reload_optimizer(*trained)
    assert watch.unchanged(state=False)


def test_hooks_alone():
    model = Convnet()
    hooks = Hooks(model)
    handle = model.norm.register_forward_hook(print)
    assert not hooks.unchanged()
    handle.remove()
    model.last.requires_grad_(False)
    assert hooks.unchanged()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("a forward hook", "a forward hook on norm"),
        ("a forward pre-hook", "a forward pre-hook on the model"),
        ("a backward hook", "a backward hook on last"),
        ("a gradient hook", "a gradient hook on last.weight"),
        ("a hook after accumulation", "a gradient hook on last.weight"),
        ("a frozen layer", None),
    ],
)
def test_the_first_hook_in_words(trained, change, words):
    assert first_hook(trained[0]) is None
    CHANGES[change](*trained)
    assert first_hook(trained[0]) == words


GENERATORS = {
    "python's own": (None, lambda _: random.random()),
    "numpy's own": (None, lambda _: np.random.rand()),
    "torch's own": (None, lambda _: torch.rand(1)),
    "random.Random": (random.Random(1), lambda mine: mine.random()),
    "torch.Generator": (torch.Generator(), lambda mine: torch.rand(1, generator=mine)),
    "RandomState": (np.random.RandomState(1), lambda mine: mine.rand()),
    "numpy's Generator": (np.random.default_rng(1), lambda mine: mine.random()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_from_the_host_are_noticed_whoever_gives_them(name):
    """As for a GPU: on a CPU torch's generator is part of what a step launches."""
    mine, draw = GENERATORS[name]
    model = Convnet()
    model.mine = mine
    host = SideEffects(model, torch.device("cuda"))
    assert host.change() is None
    draw(mine)
    assert host.change() == "the step draws random numbers on the host"
