"""One training step as a plain function: which operations run, in which order."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from kitsune.autograd.half_weights import HalfWeights
from kitsune.autograd.leaves import fresh_leaves, joined
from kitsune.capture.micro_batches import micro_batches
from kitsune.update.optimizer_update import Update, parameters_of

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Look = Callable[[torch.Tensor], None]
NOTHING: Final = contextlib.nullcontext()


class Body:
    """zero_grad -> forward and loss -> backward -> unscale, clip -> update.

    `forward(x, y)` returns the loss with its autograd graph, and calls `loss_fn`, which may be a module; `finish` is
    the optimizer's update. The result is the detached loss. With `accumulation_steps`, forward and backward run that
    often, each on a part of the batch, and the loss is the mean over all rows. The update may read the gradients of
    `half_weights` in half precision.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[[Any, Any], torch.Tensor],
        update: Update,
        *,
        forward_contexts: Sequence[Context] = (),
        step_contexts: Sequence[Context] = (),
        finish: Callable[[], None] | None = None,
        accumulation_steps: int = 1,
        loss_fn: Any = None,
        half_weights: HalfWeights | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.forward = forward
        self.update = update
        self.finish = finish or update.step
        self.forward_contexts = forward_contexts
        self.step_contexts = step_contexts
        self.accumulation_steps = accumulation_steps
        self.half_weights = half_weights
        self._known = list(model.parameters())

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Of the model and the optimizer, as they are now: layers may be replaced in mid-run. 60 us for an MLP."""
        return list(dict.fromkeys([*self.model.parameters(), *parameters_of(self.update.optimizer)]))

    def step(self, batch: tuple[Any, Any], *, fresh: bool = False) -> torch.Tensor:
        """One whole training step; `fresh` under capture (kitsune/autograd/leaves.py)."""
        loss = self.gradients(batch, fresh=fresh)
        self.finish()
        return loss

    def gradients(self, batch: tuple[Any, Any], *, fresh: bool = False, look: Look | None = None) -> torch.Tensor:
        """The step without the optimizer's update. `look` is called with each loss before its backward."""
        with entered(self.step_contexts):
            self.clear()
            loss = self._fresh_backward(batch) if fresh else self._backward(batch, look)
            self.update.prepare_gradients()
        return loss

    def _fresh_backward(self, batch: tuple[Any, Any]) -> torch.Tensor:
        with fresh_leaves(self.model) as leaves:
            loss = self._backward(batch)
        for parameter, alias in leaves.items():
            self.set_gradient(parameter, joined(parameter.grad, alias.grad))
        return loss

    def _backward(self, batch: tuple[Any, Any], look: Look | None = None) -> torch.Tensor:
        parts = micro_batches(batch, self.accumulation_steps)
        losses = [self._accumulate(part, share, look) for part, share in parts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _accumulate(self, batch: tuple[Any, Any], share: float, look: Look | None) -> torch.Tensor:
        with entered(self.forward_contexts):
            loss = self.forward(*batch)
        if look is not None:
            look(loss)
        if share != 1.0:
            loss = loss * share
        if self.half_weights is not None:
            reads_half = self.accumulation_steps == 1 and self.update.reads_half
            self.half_weights.keep_half(loss, parameters_of(self.update.optimizer) if reads_half else ())
        scaler = self.update.scaler
        (loss if scaler is None else loss * scaler.scale).backward()
        return loss.detach()

    def set_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        if self.half_weights is not None and gradient is not None and gradient.dtype != parameter.dtype:
            self.half_weights.set_gradient(parameter, gradient)
        else:
            parameter.grad = gradient

    def clear(self) -> None:
        for parameter in self._known:
            parameter.grad = None
        for parameter in parameters_of(self.update.optimizer):
            parameter.grad = None


def entered(contexts: Sequence[Context]) -> contextlib.AbstractContextManager[Any]:
    """Enters all contexts in order."""
    if len(contexts) == 1:
        return contexts[0]()
    return _all_of(contexts) if contexts else NOTHING


@contextlib.contextmanager
def _all_of(contexts: Sequence[Context]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield
