"""A model's forward and its backward as two graphs, joined by one autograd node.

The rest of the loop is the user's: loss, accumulation, clipping, several losses. Outputs are copies, since users keep
and change them, or are copied when they are read, if they are large; gradients are the graph's own tensors, which
AccumulateGrad takes over without a copy.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kitsune.autograd.half_outputs import Loss, StaticOutputs, gradient_like, stays_half
from kitsune.autograd.leaves import fresh_leaves, joined, leaves_behind, tensors_there, why_not_ours
from kitsune.autograd.outputs import PARTIAL, Listeners, Past
from kitsune.capture.autograd_node import SECOND_ORDER, own_gradients, scaled, unscale
from kitsune.capture.guards import ModelGuard
from kitsune.capture.side_effects import newest_node, why_not_filled, why_not_joined_again
from kitsune.capture.step_body import Context, entered
from kitsune.capture.unkept_caches import UnkeptCache, is_cache, unkept
from kitsune.device.backend import side_stream
from kitsune.device.cuda_graph import Recorder
from kitsune.device.static_batch import StaticBatch, opaque_type, tensors_of
from kitsune.errors import CaptureError
from kitsune.launches.pipeline import Pair, Planner
from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import parameters_of

#: Where a tensor of the output goes in its flattened structure.
TENSOR: Final = object()
WITHOUT_CAPTURE: Final = "capture_graph=False captures nothing, and from the next forward on nothing is"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class PendingBackward:
    """Lives as long as a forward waits for its backward."""


class Segments:
    """One batch signature of `forward`, captured. Call it with arguments of that signature, with gradients enabled.

    Capturing executes nothing on CUDA, so `forward` must have run (and its backward) a few times before. `contexts` are
    those of the backward. With a `planner` the launches go on several streams, as far as it does not refuse. With a
    `fused_loss`, large outputs in half precision are given out as fp32 tensors without a copy, for that loss to read.
    Raises CaptureError when it cannot be captured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        forward: Callable[..., Any],
        recorder: Recorder,
        arguments: Arguments,
        *,
        contexts: Sequence[Context] = (),
        memory_format: torch.memory_format | None = None,
        scaler: LossScaler | None = None,
        retain_graph: bool = False,
        planner: Planner | None = None,
        fused_loss: Loss | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ids = set(map(id, self.parameters))
        self.scaler = scaler
        self.retain_graph = retain_graph
        self.generation = 0
        self.has_listeners = False
        self.in_flight: weakref.ref[PendingBackward] | None = None
        self._device = recorder.device
        self._model = model
        self._optimizer = optimizer
        self._forward = forward
        self._contexts = contexts
        self._fused_loss = fused_loss
        self._given = StaticOutputs(fused_loss)
        self._are_zero: set[int] = set()  # which gradients of outputs hold zeros
        self._static = StaticBatch(arguments, recorder.device, memory_format)
        # Where warm-up forwards ran as enclosed nodes, it is still unknown of which tensors they need gradients.
        self._there = tensors_there() if contexts or scaler is not None else None
        self._planned = self._capture_planned(planner) if planner is not None else None
        if self._planned is None:
            self._capture(recorder)
        self._there = None
        self._remember_gradients()
        self._guard = ModelGuard(model, optimizer)

    def _capture(self, recorder: Recorder) -> None:
        since = newest_node()
        self._ran = recorder.executes
        # The CPU twin runs the backward once while it records it, and needs the graph again.
        self._retain = recorder.executes or self.retain_graph
        self._forward_graph, self._outputs = recorder.capture(self._run_forward)
        self._output_gradients = self._gradients_of_outputs(torch.zeros_like)
        self._backward_graph, self._gradients = recorder.capture(self._run_backward)
        if not recorder.executes:
            self._forget_graph()
            if reason := why_not_joined_again(since):
                raise CaptureError(reason)

    def _capture_planned(self, planner: Planner) -> Pair | None:
        """Undoes the runs that it takes. None where one stream has to do, for the reason in `planner.refusal`.

        Raises CaptureError where one stream would not do either.
        """
        self._ran, self._retain = False, self.retain_graph
        with side_stream(self._device), entered(self._contexts):
            pair = planner.capture_pair(
                self._run_forward, self._run_last_backward, self._inputs_of_both, self.parameters
            )
        if planner.is_erratic:
            raise CaptureError(planner.refusal)
        if pair is not None:
            one, two = pair
            self._forward_graph, (self._outputs, _) = one.graph, one.static
            self._backward_graph, self._gradients = two.graph, two.static
        return pair

    def _inputs_of_both(self) -> list[torch.Tensor]:
        self._output_gradients = self._gradients_of_outputs(torch.randn_like)  # zeros would prove nothing
        return [*tensors_of(self._static.batch), *self._output_gradients]

    def _gradients_of_outputs(self, make: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """Static tensors for the gradients of the last forward's outputs. Raises CaptureError."""
        if self._problem is not None:
            raise CaptureError(self._problem)
        outputs = [output for output in self._live if output.requires_grad]
        self._sources = Past(self._live).sources()
        if self._there is not None:
            known = (*self.parameters, *self._aliases)
            if reason := why_not_ours("the forward", outputs, known, "the model", self._there):
                raise CaptureError(reason)
        place = {id(leaf): at for leaves in (self.parameters, self._aliases) for at, leaf in enumerate(leaves)}
        self._reached = [
            {place[id(leaf)] for leaf in leaves_behind([output]) if id(leaf) in place} for output in outputs
        ]
        return [gradient_like(output, make) for output in outputs]

    @property
    def is_waiting(self) -> bool:
        """Whether a forward waits for its backward; another replay would overwrite its activations."""
        return self.in_flight is not None and self.in_flight() is not None

    @property
    def keeps_no_cache(self) -> bool:
        return any(isinstance(leaf, UnkeptCache) for leaf in self._leaves)

    def unchanged(self) -> bool:
        return self._guard.unchanged(state=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._spare_accumulated()
        if not self._ran:
            self._static.load((args, kwargs))
        outputs = list(_Joined.apply(self, *self.parameters))
        is_only = len(self._output_gradients) == 1
        self._given = StaticOutputs(self._fused_loss, self._output_gradients[0] if is_only else None)
        outputs = outputs if is_only else list(map(apart, outputs))
        given = [self._given.output(own) if at in self._in_half else own for at, own in enumerate(outputs)]
        self._listeners = Listeners([given[at] for at in self._sources])
        if self._is_tensor:
            return given[0]
        tensors = iter(given)
        return pytree.tree_unflatten([next(tensors) if leaf is TENSOR else leaf for leaf in self._leaves], self._spec)

    def _run_forward(self) -> list[torch.Tensor]:
        args, kwargs = self._static.batch
        # The cast cache of the user's autocast must not mix casts from before with those of the graph.
        torch.clear_autocast_cache()
        with torch.enable_grad(), fresh_leaves(self._model) as aliases:
            output = self._forward(*args, **kwargs)
        self._aliases = [aliases.get(parameter, parameter) for parameter in self.parameters]
        leaves, self._spec = pytree.tree_flatten(output)
        self._is_tensor = isinstance(output, torch.Tensor)
        torch.clear_autocast_cache()
        self._problem = why_not_joined(leaves)
        self._leaves = [TENSOR if isinstance(leaf, torch.Tensor) else unkept(leaf) for leaf in leaves]
        self._live = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._differentiable = [output.requires_grad for output in self._live]
        self._in_half = {at for at, own in enumerate(self._live) if self._fused_loss is not None and stays_half(own)}
        return [output.detach() for output in self._live]

    def _forget_graph(self) -> None:
        """Replays need no autograd graph, and it holds memory of the pool."""
        self._live = []

    def _run_backward(self) -> list[torch.Tensor | None]:
        # The capture may run under the user's autocast, within a forward; a backward runs outside of it.
        with entered(self._contexts), torch.autocast(self._device.type, enabled=False):
            both = torch.autograd.grad(
                [output for output in self._live if output.requires_grad],
                [*self._aliases, *self.parameters],
                scaled(self._output_gradients, self.scaler),
                retain_graph=self._retain,
                allow_unused=True,
            )
        # A layer may keep a parameter where no alias reaches it, as nn.LSTM does in its list of flat weights.
        halves = zip(self._aliases, self.parameters, both, both[len(self._aliases) :], strict=False)
        gradients = [first if alias is own else joined(first, second) for alias, own, first, second in halves]
        if reason := why_not_filled(gradients):
            raise CaptureError(reason)
        pairs = zip(self._aliases, self.parameters, strict=True)
        if any(alias.grad is not None for alias, own in pairs if alias is not own):
            raise CaptureError("the backward sets a parameter's gradient by itself, which a replayed graph would not")
        own = own_gradients(gradients, self.parameters)
        unscale(own, self.scaler)
        return own

    def _run_last_backward(self) -> list[torch.Tensor | None]:
        """Frees the activations: what is still alive of the step then is held by others."""
        gradients = self._run_backward()
        self._forget_graph()
        return gradients

    def replay_forward(self) -> tuple[torch.Tensor, ...]:
        self._given.end()
        if not self._ran:  # the CPU twin ran the forward while it recorded it, on these very arguments
            self._forward_graph.replay()
        self._ran = False
        pairs = enumerate(self._outputs)
        return tuple(output.detach() if at in self._in_half else output.clone() for at, output in pairs)

    def replay_backward(self, output_gradients: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """The gradients, as aliases of the tensors that every replay overwrites.

        None for a parameter that no output with a gradient depends on, as a plain backward leaves it.
        """
        if self._listeners.are_there():
            self.has_listeners = True
            raise CaptureError(f"{PARTIAL}; {WITHOUT_CAPTURE}")
        self._spare_accumulated()
        self._given.leave_graph()  # a planned backward may put its own tensors there
        wanted = [g for g, needs in zip(output_gradients, self._differentiable, strict=True) if needs]
        for at, (static, gradient) in enumerate(zip(self._output_gradients, wanted, strict=True)):
            if gradient is not None:
                if not lies_in(gradient, static):
                    self._given.leave_gradient()
                    static.copy_(gradient)
                self._are_zero.discard(at)
            elif at not in self._are_zero:
                static.zero_()
                self._are_zero.add(at)
        self._backward_graph.replay()
        used = set().union(*(at for at, gradient in zip(self._reached, wanted, strict=True) if gradient is not None))
        return [
            gradient.detach() if gradient is not None and at in used else None
            for at, gradient in enumerate(self._gradients)
        ]

    def _spare_accumulated(self) -> None:
        """Gradients of an earlier backward live in memory that the next replay overwrites: copy them first.

        A replay of the forward does so too: what it frees on its way is where the backward's results were put.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() in self._addresses:
                parameter.grad = parameter.grad.clone()

    def _remember_gradients(self) -> None:
        gradients = [gradient for gradient in self._gradients if gradient is not None]
        self._addresses = {gradient.data_ptr() for gradient in gradients}
        self._storages = [gradient.untyped_storage()._cdata for gradient in gradients]
        self._holders = [holders(storage) for storage in self._storages]
        self._own = [p for p, gradient in zip(self.parameters, self._gradients, strict=True) if gradient is not None]

    def gradients_are_kept(self) -> bool:
        """Whether the loop holds gradients of an earlier step elsewhere than in `p.grad`. 10 us for 200 of them."""
        now = [holders(storage) for storage in self._storages]
        if now == self._holders:
            return False
        addresses = self._addresses
        own = [p.grad is not None and p.grad.data_ptr() in addresses for p in self._own]
        return any(n > held + mine for n, held, mine in zip(now, self._holders, own, strict=True))

    def owns_gradients(self) -> bool:
        """Whether every gradient that an update reads is the graph's own tensor, so that it may be captured."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            now = parameter.grad
            if (now is None) != (gradient is None):
                return False
            if now is not None and gradient is not None and now.data_ptr() != gradient.data_ptr():
                return False
        return all(p.grad is None for p in parameters_of(self._optimizer) if id(p) not in self._ids)

    def mark_non_differentiable(self, context: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        context.mark_non_differentiable(
            *(out for out, needs in zip(outputs, self._differentiable, strict=True) if not needs)
        )


def apart(output: torch.Tensor) -> torch.Tensor:
    """An output with a node of its own: torch would call its hooks with None where only others have a gradient."""
    return output.view_as(output) if output.requires_grad else output


def lies_in(gradient: torch.Tensor, static: torch.Tensor) -> bool:
    """Whether a gradient was written where the graph reads it."""
    is_same = gradient.shape == static.shape and gradient.stride() == static.stride()
    return is_same and gradient.dtype == static.dtype and gradient.data_ptr() == static.data_ptr()


def why_not_joined(leaves: Sequence[Any]) -> str | None:
    """Why the leaves of an output cannot come out of a node of the user's autograd graph, or None."""
    opaque = next(filter(None, (opaque_type(leaf) for leaf in leaves if not is_cache(leaf))), None)
    if opaque is not None:
        return f"the model returns a {opaque}, whose tensors cannot be found"
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return "the model's output does not depend on a parameter that requires a gradient"
    return None


class _Joined(torch.autograd.Function):
    """Forward graph and backward graph as one node of the user's autograd graph."""

    @staticmethod
    def forward(context: Any, segments: Segments, *_: torch.nn.Parameter) -> tuple[torch.Tensor, ...]:
        segments.generation += 1
        context.segments, context.generation, context.token = segments, segments.generation, PendingBackward()
        segments.in_flight = weakref.ref(context.token)
        outputs = segments.replay_forward()
        segments.mark_non_differentiable(context, outputs)
        context.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(context: Any, *output_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        segments: Segments = context.segments
        if context.generation != segments.generation:
            raise CaptureError("this forward's activations were overwritten by a later one; call backward before it")
        if torch.is_grad_enabled():
            raise CaptureError(SECOND_ORDER)
        if context.token is None and not segments.retain_graph:
            raise CaptureError("a second backward needs activations that a compiled forward gives up after the first")
        gradients = segments.replay_backward(output_gradients)
        context.token = None
        if not accumulates(context):
            gradients = [gradient if gradient is None else gradient.clone() for gradient in gradients]
        return None, *gradients


def accumulates(context: Any) -> bool:
    """Inside a backward: whether it is `backward()`, which adds to p.grad; `autograd.grad` gives its results away."""
    node = context.next_functions[0][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch refuses to answer for a leaf under autograd.grad
        return False


def holders(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage))
