"""Weights cast to half precision by few launches, as one node of the autograd graph.

Autocast casts each weight by a launch of its own, and each of its gradients back to fp32 by another. The gradient of a
product is computed in half precision either way: what this node leaves out is passes over memory, not precision.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

#: Bytes in fp32 that one launch copies: a schedule on several streams can begin with the first layers.
MOST_BYTES: Final = 2**25
HAS_GRAD_DTYPE: Final = hasattr(torch.Tensor, "grad_dtype")  # since torch 2.10


class HalfWeights:
    """Makes the copies of a step's weights, and decides about the dtype of their gradients.

    Gradients stay in `dtype` as long as `takes_half()` says that the optimizer's update reads them so, and are fp32
    otherwise. They become fp32 for good once a weight is copied a second time before its backward: the sum of two
    gradients would be rounded to half precision.
    """

    def __init__(self, dtype: torch.dtype, takes_half: Callable[[], bool]) -> None:
        self.dtype = dtype
        self._takes_half = takes_half if HAS_GRAD_DTYPE else lambda: False
        self._waiting: set[int] = set()  # addresses of weights whose backward has not run
        self._is_shared = False

    def passed_to(self, function: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
        """The function, with copies in the place of the arguments at these positions, which are fp32 weights."""

        def call(*given: Any) -> Any:
            arguments = list(given)
            for at, half in zip(positions, self.of([given[at] for at in positions]), strict=True):
                arguments[at] = half
            return function(*arguments)

        return call

    def of(self, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of the weights, of the same shapes and layouts."""
        if torch.is_grad_enabled():
            addresses = {weight.data_ptr() for weight in weights}
            self._is_shared = self._is_shared or not self._waiting.isdisjoint(addresses)
            self._waiting |= addresses
            set_gradient_dtype(weights, self.dtype if self._keeps_half() else torch.float32)
        halves: tuple[torch.Tensor, ...] = _Halves.apply(self, *weights)
        return halves

    def gradients(
        self, gradients: Sequence[torch.Tensor | None], addresses: Iterable[int]
    ) -> list[torch.Tensor | None]:
        """The gradients of the weights at these addresses, from those of their copies."""
        self._waiting.difference_update(addresses)
        return list(gradients) if self._keeps_half() else widened(gradients)

    def undo(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes the gradients of these parameters fp32 again."""
        set_gradient_dtype(parameters, torch.float32)

    def _keeps_half(self) -> bool:
        return not self._is_shared and self._takes_half()


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, owner: HalfWeights, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = tuple(torch.empty_like(weight, dtype=owner.dtype) for weight in weights)
        for part in parts_of(weights):
            torch._foreach_copy_(halves[part], weights[part])
        context.owner = owner
        context.addresses = [weight.data_ptr() for weight in weights]
        context.set_materialize_grads(False)
        context.mark_non_differentiable(
            *(half for half, weight in zip(halves, weights, strict=True) if not weight.requires_grad)
        )
        return halves

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


def widened(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients in fp32, by one launch."""
    there = [gradient for gradient in gradients if gradient is not None]
    wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in there]
    if there:
        torch._foreach_copy_(wide, there)
    found = iter(wide)
    return [None if gradient is None else next(found) for gradient in gradients]


def set_gradient_dtype(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Sets the dtype in which these fp32 parameters accept a gradient, and casts those that they have."""
    if not HAS_GRAD_DTYPE:
        return
    for parameter in parameters:
        given: Any = parameter
        is_ours = parameter.dtype == torch.float32 and parameter.requires_grad and parameter.is_leaf
        if is_ours and given.grad_dtype not in (None, dtype):
            gradient, given.grad = parameter.grad, None
            given.grad_dtype = dtype
            given.grad = None if gradient is None else gradient.to(dtype)
