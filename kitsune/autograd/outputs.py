"""Checks the outputs of a forward: which are computed from others, and whether the loop asks for their gradients.

A forward that a plan runs is one node of the user's autograd graph, and its outputs are independent there. If one
output is computed from another inside the forward, that part of the gradient reaches the parameters, but not a hook on
the other output.
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
CHECKPOINT: Final = "CheckpointFunctionBackward"  # of torch.utils.checkpoint, and of copies of it in other libraries

Edge = tuple[Any, int]


class Listeners:
    """Finds hooks that are put on some tensors from now on, and tensors that retain their gradient.

    `in_backward`: also checks during the backward, because a loop may remove its hooks after it.
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
    """The dictionary in which `register_hook` keeps a tensor's hooks; created in the same way if there is none."""
    if tensor._backward_hooks is None:
        node: Any = tensor.grad_fn
        tensor._backward_hooks = OrderedDict()
        if node is not None:
            node._register_hook_dict(tensor)
    return tensor._backward_hooks


class Past:
    """The autograd graph behind some outputs. An output that was cast after the forward counts as the uncast tensor."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._ids = list(map(id, outputs))
        self._origins = [origin_of(output) for output in outputs]
        self._starts = {origin[0] for origin in self._origins if origin is not None}
        self._behind = edges_behind(self._starts)

    def sources(self) -> list[int]:
        """The positions of outputs that another output is computed from, or that are there twice."""
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
    """(node of the autograd graph, which of its results): for a leaf its AccumulateGrad node; None without gradient."""
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
    """All edges (node, which of its results) that a gradient flows to from these nodes of the autograd graph."""
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
