"""The optimizer that is wrapped: as it is, or built; and a copy of it as a checkpoint shows it."""

import pytest
import torch
from torch import nn

from kitsune.errors import SettingsError
from kitsune.runtime.wrapped_optimizer import as_given, inner_of


def parameters():
    return [nn.Parameter(torch.ones(2))]


def test_an_optimizer_is_taken_as_it_is_and_a_class_is_built():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    assert inner_of(optimizer, None, {}) is optimizer
    built = inner_of(torch.optim.SGD, parameters(), {"lr": 0.2})
    assert (type(built), built.param_groups[0]["lr"]) == (torch.optim.SGD, 0.2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((torch.optim.SGD(parameters()), None, {"lr": 1}), "lr: the optimizer is built already"),
        ((torch.optim.SGD(parameters()), parameters(), {}), "params: the optimizer is built already"),
        ((nn.Linear, parameters(), {}), "neither an optimizer nor a class"),
        ((torch.optim.SGD, None, {}), "SGD needs the model's parameters"),
        ((torch.optim.SGD, parameters(), {"speed": 1}), "SGD does not take these arguments"),
    ],
)
def test_what_makes_no_optimizer_is_refused(arguments, told):
    with pytest.raises(SettingsError, match=told):
        inner_of(*arguments)


def test_a_copy_as_given_has_what_a_checkpoint_shows_and_the_same_parameters():
    optimizer = torch.optim.Adam(parameters(), lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()

    def show(_, checkpoint):
        checkpoint["param_groups"][0]["lr"] = 7.0

    optimizer.register_state_dict_post_hook(show)
    given = as_given(optimizer)
    (parameter,) = given.param_groups[0]["params"]
    assert parameter is optimizer.param_groups[0]["params"][0]
    assert (given.param_groups[0]["lr"], given.state[parameter]["step"].item()) == (7.0, 1.0)
