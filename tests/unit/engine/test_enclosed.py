"""A forward as one node: gradients of all that it was computed from come out of it."""

import contextlib

import torch
from torch import nn

from kitsune.engine.enclosed import enclosed


def test_what_is_no_parameter_gets_its_gradient_too():
    """A leaf, and what another model has made, whose parameters are behind it."""
    torch.manual_seed(0)
    model, other, extra = nn.Linear(4, 2), nn.Linear(4, 2), torch.zeros(2, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)

    def gradients(call):
        made = other(x.detach())
        (call(lambda batch: model(batch) * made + extra) ** 2).sum().backward()
        leaves = [x, extra, *model.parameters(), *other.parameters()]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    plain = gradients(lambda run: run(x))
    inside = gradients(lambda run: enclosed(run, model, (x,), {}, contexts=[contextlib.nullcontext], scaler=None))
    assert all(each is not None for each in plain)
    assert all(map(torch.equal, inside, plain))
