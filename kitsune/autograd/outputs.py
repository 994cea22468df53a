"""Outputs of a forward: which of them others are computed from, and whether the loop asks for their gradients.

A forward that a plan runs is one node of the user's autograd graph, so its outputs lie side by side there: what flows
from one to another inside is in the gradients of the parameters, but not in what a hook on an output sees.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

PARTIAL: Final = (
    "the loop asks for the gradient of an output from which another one is computed (register_hook, retain_grad), "
    "which is not whole where a plan runs the forward"
)
REENTRANT: Final = "torch.utils.checkpoint with use_reentrant=True computes in a plain backward() only"
CAST: Final = "ToCopyBackward0"
CHECKPOINT: Final = "CheckpointFunctionBackward"  # of torch.utils.checkpoint, and of those that are made after it

Edge = tuple[Any, int]


class Listeners:
    """Hooks on some tensors, from now on, and whether they keep their gradients.

    `in_backward`: also looked for while a gradient comes, since a loop may take its hooks away again.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, in_backward: bool = False) -> None:
        self._hooks = [hooks_of(tensor) for tensor in tensors]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._have_been = False
        for node in {tensor.grad_fn for tensor in tensors if in_backward and tensor.grad_fn is not None}:
            node.register_prehook(self._look)

    def are_there(self) -> bool:
        alive = (reference() for reference in self._tensors)
        is_kept = any(tensor is not None and tensor.retains_grad for tensor in alive)
        return self._have_been or any(self._hooks) or is_kept

    def _look(self, _: object) -> None:
        self._have_been = self.are_there()


def hooks_of(tensor: torch.Tensor) -> Mapping[int, Callable[..., Any]]:
    """Where `register_hook` puts them for a tensor; made as it would make it."""
    if tensor._backward_hooks is None:
        node: Any = tensor.grad_fn
        tensor._backward_hooks = OrderedDict()
        if node is not None:
            node._register_hook_dict(tensor)
    return tensor._backward_hooks


class Past:
    """What outputs were computed from: the autograd graph behind them. One that was cast behind the forward counts as
    what it was before."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._ids = list(map(id, outputs))
        self._origins = [origin_of(output) for output in outputs]
        self._starts = {origin[0] for origin in self._origins if origin is not None}
        self._behind = edges_behind(self._starts)

    def sources(self) -> list[int]:
        """At which places of the outputs those are that another one is computed from, or that are there twice."""
        return [
            at
            for at, (origin, own) in enumerate(zip(self._origins, self._ids, strict=True))
            if origin is not None and (origin in self._behind or self._ids.count(own) > 1)
        ]

    def why_not_grad(self) -> str | None:
        """Why `torch.autograd.grad` cannot go through this graph, or None."""
        nodes = {*self._starts, *(node for node, _ in self._behind)}
        return REENTRANT if any(node.name() == CHECKPOINT for node in nodes) else None


def origin_of(output: torch.Tensor) -> Edge | None:
    """Which result of which node of the autograd graph it is; of a leaf the node that adds to its gradient."""
    if not output.requires_grad:
        return None
    node: Any = output.grad_fn
    if node is None:
        return torch.autograd.graph.get_gradient_edge(output).node, 0
    if node.name() == CAST:
        before: Edge = node.next_functions[0]
        return before
    return node, output.output_nr


def edges_behind(starts: Iterable[Any]) -> set[Edge]:
    """What a gradient flows to from these nodes of the autograd graph, as (node, which of its results)."""
    found: set[Edge] = set()
    nodes = list(starts)
    seen = set(nodes)
    while nodes:
        following = {edge for edge in nodes.pop().next_functions if edge[0] is not None}
        new = {node for node, _ in following} - seen
        found |= following
        seen |= new
        nodes += new
    return found
