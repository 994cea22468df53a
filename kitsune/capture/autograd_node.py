"""An uncaptured forward as one autograd node, so that its backward runs in our contexts and loss scaling."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.autograd.leaves import There, why_not_ours
from kitsune.autograd.outputs import PARTIAL, Listeners, Past
from kitsune.capture.step_body import Context, entered
from kitsune.device.static_batch import opaque_type
from kitsune.errors import CaptureError, DeclinedError
from kitsune.update.loss_scaler import LossScaler

SECOND_ORDER = (
    "create_graph=True cannot differentiate through a forward that a plan runs: "
    "call optimizer.close() before, and train this part as it was given"
)
HOOKED = "a hook on the gradient of a parameter would run twice"


def enclosed(
    run: Callable[..., Any],
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    *,
    contexts: Sequence[Context],
    scaler: LossScaler | None,
    before: There | None = None,
) -> Any:
    """run(*args, **kwargs), whose backward enters `contexts` and is scaled; all gradients come out unscaled.

    Raises DeclinedError where that is not possible: the output hides tensors that would have to be scaled, a parameter
    has a hook on its gradient, the forward has re-entrant checkpoints, or, where the tensors of `before` are given, it
    needs the gradient of one that is no parameter.
    """
    enclosure = Enclosure(run, (args, kwargs), contexts, scaler, before)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter._backward_hooks for parameter in parameters):
        raise DeclinedError("precision", HOOKED)
    own = _Enclosed.apply(enclosure, *enclosure.inputs, *parameters)
    enclosure.listeners = Listeners([own[at] for at in enclosure.past.sources()])
    outputs = iter(own)
    leaves = [next(outputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in enclosure.leaves]
    return pytree.tree_unflatten(leaves, enclosure.spec)


class Enclosure:
    """The graph inside the node: from copies of differentiable inputs, and from the parameters, to the output."""

    def __init__(
        self,
        run: Callable[..., Any],
        arguments: Any,
        contexts: Sequence[Context],
        scaler: LossScaler | None,
        before: There | None,
    ) -> None:
        self.run = run
        self.before = before
        self.contexts = contexts
        self.scaler = scaler
        self.arguments, self.arguments_spec = pytree.tree_flatten(arguments)
        self.inputs = [leaf for leaf in self.arguments if is_differentiable(leaf)]
        self.listeners = Listeners(())

    def forward(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts = [given.detach().requires_grad_() for given in self.inputs]
        fresh = iter(starts)
        with torch.enable_grad():
            # clones: a model may change its input in place, which a leaf does not suffer
            arguments = [next(fresh).clone() if is_differentiable(leaf) else leaf for leaf in self.arguments]
            args, kwargs = pytree.tree_unflatten(arguments, self.arguments_spec)
            self.leaves, self.spec = pytree.tree_flatten(self.run(*args, **kwargs))
        opaque = next(filter(None, map(opaque_type, self.leaves)), None)
        if self.scaler is not None and opaque is not None:
            raise DeclinedError("precision", f"fp16 scales what the model returns, and a {opaque} hides its tensors")
        self.sources = [*starts, *parameters]
        self.live = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.past = Past(self.live)
        if reason := self.past.why_not_grad() or self._why_not_ours():
            raise DeclinedError("precision", reason)
        return self.live

    def _why_not_ours(self) -> str | None:
        """Under `functional_call` other tensors are in the place of parameters, and what is behind them is outside."""
        if self.before is None or not all(source.is_leaf for source in self.sources):
            return None
        return why_not_ours("the forward", self.live, self.sources, "the model", self.before, "a scaled backward")

    def backward(self, output_gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if self.listeners.are_there():
            raise CaptureError(f"{PARTIAL}; leave the precision out of the plan")
        pairs = [
            (live, gradient)
            for live, gradient in zip(self.live, output_gradients, strict=True)
            if live.requires_grad and gradient is not None
        ]
        with entered(self.contexts):
            gradients = torch.autograd.grad(
                [live for live, _ in pairs],
                self.sources,
                scaled([gradient for _, gradient in pairs], self.scaler),
                retain_graph=keeps_graph(),
                allow_unused=True,
            )
        own = own_gradients(gradients, self.sources)
        unscale(own, self.scaler)
        return own


class _Enclosed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, enclosure: Enclosure, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        live = enclosure.forward(sources[len(enclosure.inputs) :])
        context.enclosure = enclosure
        context.set_materialize_grads(False)
        outputs = tuple(output.detach().clone() for output in live)
        context.mark_non_differentiable(
            *(out for out, inner in zip(outputs, live, strict=True) if not inner.requires_grad)
        )
        return outputs

    @staticmethod
    def backward(context: Any, *output_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise CaptureError(SECOND_ORDER)
        return None, *context.enclosure.backward(output_gradients)


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def keeps_graph() -> bool:
    """Inside a backward: whether the user asked for retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def scaled(gradients: list[torch.Tensor], scaler: LossScaler | None) -> list[torch.Tensor]:
    return gradients if scaler is None else [gradient * scaler.scale for gradient in gradients]


def unscale(gradients: Sequence[torch.Tensor | None], scaler: LossScaler | None) -> None:
    if scaler is not None:
        scaler.unscale([gradient for gradient in gradients if gradient is not None])


def own_gradients(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Each gradient in a storage of its own and in the layout of its source, as AccumulateGrad would have made it.

    autograd.grad may return one tensor for two parameters, which must not be unscaled or clipped twice. Sparse ones
    stay as they are.
    """
    seen: set[int] = set()
    own: list[torch.Tensor | None] = []
    for gradient, source in zip(gradients, sources, strict=True):
        if gradient is None or gradient.layout is not torch.strided:
            own.append(gradient)
            continue
        is_own = storage_of(gradient) not in seen and same_layout(gradient, source)
        kept = gradient if is_own else torch.empty_like(source).copy_(gradient)
        seen.add(storage_of(kept))
        own.append(kept)
    return own


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def same_layout(gradient: torch.Tensor, source: torch.Tensor) -> bool:
    pairs = zip(gradient.size(), gradient.stride(), source.stride(), strict=True)
    return all(size == 1 or given == wanted for size, given, wanted in pairs)
