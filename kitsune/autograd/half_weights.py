"""Weights cast to half precision by few launches, as one node of the autograd graph.

Autocast casts each weight by a launch of its own, and each of its gradients back to fp32 by another. The gradient of a
product is computed in half precision either way: what this node leaves out is passes over memory, not precision.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

from kitsune.autograd.leaves import ACCUMULATES
from kitsune.base import optional_imports
from kitsune.errors import UnfitError

#: Bytes in fp32 that are copied at once: a schedule on several streams can begin with the first layers.
MOST_BYTES: Final = 2**25
HAS_GRAD_DTYPE: Final = hasattr(torch.Tensor, "grad_dtype")  # since torch 2.10
COPIES: Final = "_CopiesBackward"


class HalfWeights:
    """Makes copies of a step's weights in `dtype`, and decides about the dtype of their gradients.

    Gradients are fp32, made by few launches, unless `keep_half` allowed half precision before the backward.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: set[int] = set()  # addresses of weights whose next gradient stays in half precision
        self._accepting: dict[int, weakref.ref[torch.Tensor]] = {}

    def with_copies(self, function: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
        """The function, with copies in the place of the arguments at these positions, which are fp32 weights."""

        def call(*given: Any) -> Any:
            arguments = list(given)
            for at, half in zip(positions, self.copies([given[at] for at in positions]), strict=True):
                arguments[at] = half
            return function(*arguments)

        return call

    def copies(self, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Of the same shapes and layouts."""
        made: tuple[torch.Tensor, ...] = _Copies.apply(self, *weights)
        return made

    def keep_half(self, loss: torch.Tensor, updated: Iterable[torch.Tensor]) -> None:
        """Lets gradients of the coming backward of `loss` stay in half precision where only the update reads them.

        These are the gradients of `updated` weights that reach `loss` by one copy and nothing else, since a sum of
        several gradients is in fp32. A weight with a hook on its gradient is left out.
        """
        self._kept.clear()
        addresses = {weight.data_ptr() for weight in updated}
        if not HAS_GRAD_DTYPE or not addresses:
            return
        for weight, nodes in readers_of_leaves(loss).items():
            is_read_once = [node.name() for node in nodes] == [COPIES]
            is_hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
            if is_read_once and not is_hooked and weight.dtype == torch.float32 and weight.data_ptr() in addresses:
                self._kept.add(weight.data_ptr())
                self.set_gradient(weight, None)

    def set_gradient(self, weight: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Sets the gradient of a weight, which accepts one in any dtype from now on, until `undo`."""
        accept_any_gradient(weight)
        self._accepting[id(weight)] = weakref.ref(weight)
        weight.grad = gradient

    def gradients(
        self, gradients: Sequence[torch.Tensor | None], addresses: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """The gradients of the weights at these addresses, from those of their copies."""
        wide = [
            gradient
            for gradient, at in zip(gradients, addresses, strict=True)
            if gradient is not None and at not in self._kept
        ]
        found = iter(widened(wide))
        return [
            gradient if gradient is None or at in self._kept else next(found)
            for gradient, at in zip(gradients, addresses, strict=True)
        ]

    def undo(self) -> None:
        """Makes the gradients of all weights fp32 again."""
        for reference in self._accepting.values():
            weight: Any = reference()
            if weight is not None:
                gradient, weight.grad = weight.grad, None
                weight.grad_dtype = weight.dtype
                weight.grad = None if gradient is None else gradient.to(weight.dtype)
        self._accepting.clear()


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, owner: HalfWeights, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copies = tuple(torch.empty_like(weight, dtype=owner.dtype) for weight in weights)
        for part in parts_of(weights):
            cast_all(copies[part], weights[part])
        context.owner = owner
        context.addresses = [weight.data_ptr() for weight in weights]
        context.set_materialize_grads(False)
        context.mark_non_differentiable(
            *(copy for copy, weight in zip(copies, weights, strict=True) if not weight.requires_grad)
        )
        return copies

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *context.owner.gradients(gradients, context.addresses)


def parts_of(weights: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Neighbours of up to MOST_BYTES together, or one that is larger."""
    begin, taken = 0, 0
    for at, weight in enumerate(weights):
        if at > begin and taken + weight.nbytes > MOST_BYTES:
            yield slice(begin, at)
            begin, taken = at, 0
        taken += weight.nbytes
    yield slice(begin, len(weights))


def widened(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in fp32, by few launches."""
    wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    if wide:
        cast_all(wide, gradients)
    return wide


def cast_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target, of at least one: on a GPU by Kitsune's kernel, without Triton by torch."""
    copy: Callable[..., None] = kernel_of_casts() if targets[0].is_cuda else torch._foreach_copy_
    copy(targets, sources)


@cache
def kernel_of_casts() -> Callable[..., None]:
    try:
        module = optional_imports.load("kitsune.kernels.casts", extra="triton", packages=("triton",))
    except UnfitError:
        return torch._foreach_copy_
    kernel: Callable[..., None] = module.cast_all
    return kernel


def readers_of_leaves(loss: torch.Tensor) -> Mapping[torch.Tensor, list[Any]]:
    """{leaf of the autograd graph: the nodes that pass it a gradient, one for each edge}."""
    found: dict[torch.Tensor, list[Any]] = {}
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen: set[Any] = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following.name() == ACCUMULATES:
                found.setdefault(following.variable, []).append(node)
            elif following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def accept_any_gradient(weight: Any) -> None:
    """Lets autograd and the user set a gradient of any dtype. Where torch cannot, all gradients are fp32."""
    if HAS_GRAD_DTYPE and weight.grad_dtype is not None:
        weight.grad_dtype = None
