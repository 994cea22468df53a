"""Counts the kernels that a captured graph launches while it runs, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import tracing
from torch.fx import Graph, GraphModule

from kitsune.device.saved_state import SavedState
from kitsune.errors import CaptureError
from kitsune.fusion.benefit import Run, current, run_of, sync_checks_off
from kitsune.launches.execution.kernel_trace import kernels_of

#: A run -> the number of kernels that it launches.
Counter = Callable[[Run], int]


def counter_of(gpu: torch.device | None) -> Counter:
    """The launch counter for a device. Raises CaptureError where launches cannot be counted."""
    if gpu is None:
        raise CaptureError("a CPU launches none")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise CaptureError("a run that the other processes of a group do not make could wait for them for ever")
    return on_gpu


def on_gpu(run: Run) -> int:
    """The number of kernels by torch.profiler, without copies and memsets. Raises CaptureError if profiling fails.

    A first run goes before, since compiling, autotuning and initialisation do not count.
    """
    with sync_checks_off():
        run()
        return kernels_of(run).total()


def twin_of(graph: GraphModule) -> GraphModule:
    """A copy of the graph with the same weights, which does not change when the graph is rewritten."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return GraphModule(graph, nodes)


def launches_of(
    given: GraphModule, fused: Callable[..., Any], inputs: Sequence[Any], counter: Counter, device: torch.device
) -> tuple[int, int]:
    """The numbers of launches of a graph, run eagerly, and of its fused version.

    Both run on copies of the inputs, and writes to weights are undone. The backward goes from all results to all inputs
    that require a gradient, as that of a step does.
    """
    state = SavedState(lambda: list(given.buffers()), device)
    with state, tracing(None), current(device):  # not part of the compilation in progress
        counts = [counter(run_of(function, [copy_of(one) for one in inputs])) for function in (given, fused)]
    return counts[0], counts[1]


def copy_of(value: Any) -> Any:
    """A copy of a tensor with the same strides; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    spread = torch.as_strided(value.detach(), (reach if value.numel() else 0,), (1,)).clone()
    return torch.as_strided(spread, value.shape, value.stride()).requires_grad_(value.requires_grad)
