"""Segments: a model's forward and its backward as two graphs, joined by one autograd node.

Around them everything stays the user's: the loss, accumulation, clipping, several losses. Outputs are copies, since
users keep and change them; gradients are the graph's own tensors, which AccumulateGrad steals.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.device import Graph, Recorder
from kitsune.engine.scaler import LossScaler
from kitsune.engine.static import StaticBatch
from kitsune.engine.watch import Watch
from kitsune.errors import CaptureError


TENSOR = object()  # where a tensor stands in the model's output


class Token:
    """Alive as long as a forward waits for its backward."""


class Segments:
    """One batch signature of `forward`, captured. Call it with arguments of that signature, with gradients enabled.

    Capturing executes nothing on CUDA, so `forward` must have run (and its backward) a few times before.
    Raises CaptureError when it cannot be captured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        forward: Callable[..., Any],
        recorder: Recorder,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        memory_format: torch.memory_format | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.scaler = scaler
        self.generation = 0
        self.in_flight: weakref.ref[Token] | None = None
        self._forward = forward
        self._retain = self._ran = recorder.executes
        self._static = StaticBatch(arguments, recorder.device, memory_format)
        self._forward_graph, self._outputs = recorder.capture(self._run_forward)
        if not any(output.requires_grad for output in self._live):
            raise CaptureError("the model's output does not depend on a parameter that requires a gradient")
        self._output_gradients = [torch.zeros_like(output) for output in self._live if output.requires_grad]
        self._backward_graph, self._gradients = recorder.capture(self._run_backward)
        if not self._retain:
            # The captured autograd graph would keep AccumulateGrad nodes alive that belong to the capturing stream.
            self._live = [output.detach().requires_grad_(output.requires_grad) for output in self._live]
        self._addresses = {gradient.data_ptr() for gradient in self._gradients if gradient is not None}
        self._watch = Watch(model, optimizer)

    @property
    def is_waiting(self) -> bool:
        """Whether a forward is outstanding, whose activations another replay would overwrite."""
        return self.in_flight is not None and self.in_flight() is not None

    def unchanged(self) -> bool:
        return self._watch.unchanged(state=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._static.load((args, kwargs))
        outputs = _Joined.apply(self, *self.parameters)
        if self._is_tensor:
            return outputs[0]
        tensors = iter(outputs)
        leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def _run_forward(self) -> list[torch.Tensor]:
        args, kwargs = self._static.batch
        with torch.enable_grad():
            output = self._forward(*args, **kwargs)
        leaves, self._spec = pytree.tree_flatten(output)
        self._live = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = isinstance(output, torch.Tensor)
        return [output.detach() for output in self._live]

    def _run_backward(self) -> tuple[torch.Tensor | None, ...]:
        gradients = torch.autograd.grad(
            [output for output in self._live if output.requires_grad],
            self.parameters,
            scaled(self._output_gradients, self.scaler),
            retain_graph=self._retain,
            allow_unused=True,
        )
        unscale(gradients, self.scaler)
        return gradients

    def replay_forward(self) -> tuple[torch.Tensor, ...]:
        if not self._ran:  # the CPU twin ran the forward while it recorded it, on these very arguments
            self._forward_graph.replay()
        self._ran = False
        return tuple(output.clone() for output in self._outputs)

    def replay_backward(self, output_gradients: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        self._spare_accumulated()
        wanted = [g for g, live in zip(output_gradients, self._live, strict=True) if live.requires_grad]
        for static, gradient in zip(self._output_gradients, wanted, strict=True):
            if gradient is None:
                static.zero_()
            else:
                static.copy_(gradient)
        self._backward_graph.replay()
        return [gradient if gradient is None else gradient.detach() for gradient in self._gradients]

    def _spare_accumulated(self) -> None:
        """Gradients of the last micro-batch live in the buffers that the next replay overwrites: copy them first."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() in self._addresses:
                parameter.grad = parameter.grad.clone()

    def owns_gradients(self) -> bool:
        """Whether every p.grad is the graph's own tensor, so that a captured update may read it."""
        pairs = zip(self.parameters, self._gradients, strict=True)
        return all(
            p.grad is g or (p.grad is not None and g is not None and p.grad.data_ptr() == g.data_ptr())
            for p, g in pairs
        )

    def mark_differentiable(self, context: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        context.mark_non_differentiable(
            *(out for out, live in zip(outputs, self._live, strict=True) if not live.requires_grad)
        )


class _Joined(torch.autograd.Function):
    """Forward graph and backward graph as one node of the user's autograd graph."""

    @staticmethod
    def forward(context: Any, segments: Segments, *_: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
        segments.generation += 1
        context.segments, context.generation, context.token = segments, segments.generation, Token()
        segments.in_flight = weakref.ref(context.token)
        outputs = segments.replay_forward()
        segments.mark_differentiable(context, outputs)
        context.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(context: Any, *output_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        segments: Segments = context.segments
        if context.generation != segments.generation:
            raise CaptureError("this forward's activations were overwritten by a later one; call backward before it")
        if torch.is_grad_enabled():
            raise CaptureError("create_graph=True needs an eager step: build the optimizer with capture_graph=False")
        gradients = segments.replay_backward(output_gradients)
        context.token = None
        return None, *gradients


class Scaled(torch.autograd.Function):
    """An uncaptured forward with fp16 loss scaling inside: the user's loss, backward and gradients stay true-scale."""

    @staticmethod
    def forward(
        context: Any, run: Callable[[], list[torch.Tensor]], scaler: LossScaler, *parameters: torch.nn.Parameter
    ) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            context.live = run()
        context.scaler, context.parameters = scaler, parameters
        outputs = tuple(output.detach().clone() for output in context.live)
        context.mark_non_differentiable(
            *(out for out, live in zip(outputs, context.live, strict=True) if not live.requires_grad)
        )
        return outputs

    @staticmethod
    def backward(context: Any, *output_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = [(live, g) for live, g in zip(context.live, output_gradients, strict=True) if live.requires_grad]
        gradients = torch.autograd.grad(
            [live for live, _ in pairs],
            context.parameters,
            scaled([g for _, g in pairs], context.scaler),
            allow_unused=True,
        )
        unscale(gradients, context.scaler)
        return None, None, *gradients


def scaled(gradients: list[torch.Tensor], scaler: LossScaler | None) -> list[torch.Tensor]:
    return gradients if scaler is None else [gradient * scaler.scale for gradient in gradients]


def unscale(gradients: tuple[torch.Tensor | None, ...], scaler: LossScaler | None) -> None:
    if scaler is not None:
        scaler.unscale([gradient for gradient in gradients if gradient is not None])
