"""Outputs of a forward: which of them others are computed from, and whether the loop asks for their gradients.

A forward that a plan runs is one node of the user's autograd graph, so its outputs lie side by side there: what flows
from one to another inside is in the gradients of the parameters, but not in what a hook on an output sees.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

PARTIAL: Final = (
    "the loop asks for the gradient of an output from which another one is computed (register_hook, retain_grad), "
    "which is not whole where a plan runs the forward"
)


class Listeners:
    """Hooks on some tensors, from now on, and whether they keep their gradients."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._hooks = [hooks_of(tensor) for tensor in tensors]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def are_there(self) -> bool:
        alive = (reference() for reference in self._tensors)
        return any(self._hooks) or any(tensor is not None and tensor.retains_grad for tensor in alive)


def hooks_of(tensor: torch.Tensor) -> Mapping[int, Callable[..., Any]]:
    """Where `register_hook` puts them for a tensor that is no leaf; made as it would make it."""
    if tensor._backward_hooks is None:
        node: Any = tensor.grad_fn
        tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    return tensor._backward_hooks


def sources_among(outputs: Sequence[torch.Tensor]) -> list[int]:
    """At which places of outputs those are that another one is computed from, or that are there twice."""
    nodes = [output.grad_fn for output in outputs]
    behind = set().union(*(nodes_behind(node) for node in set(filter(None, nodes))))
    ids = list(map(id, outputs))
    return [
        at
        for at, (node, own) in enumerate(zip(nodes, ids, strict=True))
        if node is not None and (node in behind or ids.count(own) > 1)
    ]


def nodes_behind(node: Any) -> set[Any]:
    """The nodes of the autograd graph that a gradient flows to from this one, itself not among them."""
    found: set[Any] = set()
    nodes: list[Any] = [node]
    while nodes:
        following = {each for each, _ in nodes.pop().next_functions if each is not None} - found
        found |= following
        nodes += following
    return found
