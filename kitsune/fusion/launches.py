"""A captured graph and its inputs in, how many kernels it launches out: counted while it runs, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import tracing
from torch.fx import Graph, GraphModule

from kitsune.capture.rollback import Rollback
from kitsune.errors import CaptureError
from kitsune.fusion.benefit import Run, current, run_of, watching_nothing
from kitsune.launches.execution.kernel_trace import kernels_of

#: A run -> the kernels that one of it launches.
Counter = Callable[[Run], int]


def counter_of(gpu: torch.device | None) -> Counter:
    """Raises CaptureError where nothing can be counted."""
    if gpu is None:
        raise CaptureError("a CPU launches none")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise CaptureError("a run that the other processes of a group do not make could wait for them for ever")
    return on_gpu


def on_gpu(run: Run) -> int:
    """As torch.profiler sees them; the driver's own copies and fills are none. Raises CaptureError where it cannot.

    One run goes before: what is compiled, tuned or set up at a first call is not the step's.
    """
    with watching_nothing():
        run()
        return kernels_of(run).total()


def twin_of(graph: GraphModule) -> GraphModule:
    """The same nodes on the same weights, which stay as they are when the graph is rewritten."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return GraphModule(graph, nodes)


def launches_of(
    given: GraphModule, fused: Callable[..., Any], inputs: Sequence[Any], counter: Counter, device: torch.device
) -> tuple[int, int]:
    """Of a graph, run eagerly, and of what became of it. On copies: what they write into stays as it was.

    The backward goes from all results to all inputs that ask for a gradient, as that of a step does.
    """
    before = Rollback(given, device)
    try:
        with tracing(None), current(device):  # not part of what is being compiled around it
            counts = [counter(run_of(function, [copy_of(one) for one in inputs])) for function in (given, fused)]
            return counts[0], counts[1]
    finally:
        before.restore()


def copy_of(value: Any) -> Any:
    """A tensor with the same strides, on memory of its own; what is none is itself."""
    if not isinstance(value, torch.Tensor):
        return value
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    spread = torch.as_strided(value.detach(), (reach if value.numel() else 0,), (1,)).clone()
    return torch.as_strided(spread, value.shape, value.stride()).requires_grad_(value.requires_grad)
