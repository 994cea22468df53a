"""Activations on the host, on a machine without a GPU: structures, settings, and the same gradients."""

import pytest
import torch
from torch import nn

from kitsune.errors import SettingsError
from kitsune.memory import DynamicActivationOffloading


def test_structures_and_values_come_back():
    offloader = DynamicActivationOffloading(offload_device="cpu")
    x = torch.randn(3, 4, requires_grad=True)
    given = {"a": [x * 2, 7], "b": (torch.arange(5), "text", None)}
    kept = offloader.offload_activations(given)
    assert kept["a"][1] == 7
    assert kept["b"][1:] == ("text", None)
    assert not kept["a"][0].requires_grad
    assert offloader.offloaded_bytes == 3 * 4 * 4 + 5 * 8
    given["b"][0].zero_()
    back = offloader.reload_activations(kept, "cpu")
    torch.testing.assert_close(back["a"][0], x * 2)
    assert back["b"][0].tolist() == [0, 1, 2, 3, 4]


def test_a_forward_on_the_host_saves_what_it_saved():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x, found = torch.randn(4, 8), []
    offloader = DynamicActivationOffloading(least_bytes=0)
    for context in (offloader.applied(model), torch.enable_grad()):
        model.zero_grad()
        with context:
            loss = model(x).sum()
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert offloader.offloaded_bytes == 0


def test_activations_go_to_the_host_only():
    with pytest.raises(SettingsError, match="which is cpu"):
        DynamicActivationOffloading("cuda:1")
