"""Captured graphs: a function in, what it launches as one graph out, to be issued many times.

The CPU twin of a captured graph re-runs its function and writes the results into the tensors of the first run, so that
everything built on static buffers can be tested without a GPU.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
from torch.utils import _pytree as pytree

from kitsune.device.backend import capture_stream, first_line
from kitsune.device.gc_control import uncollected
from kitsune.device.memset_rewrite import replace_memsets
from kitsune.errors import CaptureError

#: Real runs before a capture. Compiling, autotuning and state that is made at first use are over after them.
WARM_RUNS: Final = 3


class Graph(Protocol):
    """Launches recorded once, issued many times, on the tensors they were recorded with."""

    def replay(self) -> None: ...


class Recorder:
    """Captures functions into graphs that share one memory pool.

    `executes` tells whether capturing runs the function once for real (the CPU twin does, CUDA does not).
    """

    def __init__(self, device: torch.device, *, is_passing: bool = False) -> None:
        self.device = device
        self.executes = device.type != "cuda"
        self._is_passing = is_passing
        self._pool: Any = None
        self._graphs: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()

    def taken_bytes(self) -> int:
        """What the pool of its graphs has taken from the GPU, free blocks and workspaces of libraries counted in."""
        # Not of this pool alone: torch lets go of the numbers of a pool that it was not given (pytorch#196366).
        segments = torch.cuda.memory_snapshot() if self._pool is not None else []
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self._pool))

    def apart(self) -> "Recorder":
        """One for the same device, for graphs that soon go again: they share nothing with ours."""
        return Recorder(self.device, is_passing=True)

    def capture(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of what `function` launches, and its result, whose tensors every replay overwrites.

        Raises CaptureError; generator and current stream of the device are usable afterwards either way.
        """
        if self.executes:
            return HostGraph.record(function)
        try:
            return self._captured(function)
        except CaptureError:
            raise
        except Exception as error:
            self._leave_pool()
            self._mend_generator()
            first = error.__context__ or error  # ending a broken capture raises an error of its own
            raise CaptureError(f"CUDA graph capture failed: {first_line(first)}") from error

    def _leave_pool(self) -> None:
        """A failed capture leaves the allocator recording for ever, and it frees nothing that two streams used then."""
        index = self.device.index or 0
        with contextlib.suppress(RuntimeError):  # it was left already
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)

    def _mend_generator(self) -> None:
        """A failed capture leaves the generator capturing for ever ("offset increment outside graph capture"); one that
        ends well takes it out of that. Another state in its place would leave the graphs behind that draw from it."""
        # Where that fails too, the GPU is lost: the error that says why is on its way.
        with contextlib.suppress(RuntimeError), self._capturing(torch.cuda.CUDAGraph()):
            torch.cuda._sleep(1)

    def _captured(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        # cuBLAS keeps its workspaces in a process-wide table, which Inductor's graphs clear whenever they like. A graph
        # whose workspace came from there would go on writing to memory that is somebody else's by now (seen on an
        # H200: an illegal access). With the table empty, the workspace is taken from the graph's own pool.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            if not self._is_passing:
                gc.collect()  # the memory of dead cycles is had for the graph; 0.25 s once Inductor is loaded
            with uncollected():  # a CUDA graph that dies during a capture breaks it
                return self._graph_of(function)
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def _graph_of(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        if not self._graphs:  # a pool dies with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with self._capturing(graph, self._pool):
            result = function()
        replace_memsets(graph, self.device)
        graph.instantiate()
        captured = DeviceGraph(graph, self.device)
        self._graphs.add(captured)
        return captured, result

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
        stream = capture_stream(self.device.index or 0)
        # torch.cuda.graph stays on its stream when ending a broken capture raises: the outer context leaves it.
        # thread_local: a data loader's pinning thread may call CUDA while we capture.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
        # Capturing begins by setting what the graph's random numbers start from, on this stream. Later than the first
        # replay, which is on another one, it would have that replay repeat numbers: where ten processes share an H200,
        # some did.
        stream.synchronize()


class DeviceGraph:
    """A CUDA graph that is issued on its own GPU, whichever one is current."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph = graph
        self._device = device

    def replay(self) -> None:
        if torch.cuda.current_device() == self._device.index:  # as a rule, and a block for it costs the host time
            self._graph.replay()
            return
        with torch.cuda.device(self._device):
            self._graph.replay()


class HostGraph:
    """The CPU twin: the same aliasing rules as a CUDA graph, by running the function again."""

    def __init__(self, function: Callable[[], Any], results: list[torch.Tensor]) -> None:
        self._function = function
        self._results = results

    @classmethod
    def record(cls, function: Callable[[], Any]) -> tuple["HostGraph", Any]:
        result = function()
        return cls(function, tensors_in(result)), result

    def replay(self) -> None:
        fill(self._results, self._function())


def fill(static: Any, values: Any) -> None:
    """Copies tensors into those that stand at the same places of another structure."""
    with torch.no_grad():
        for one, two in zip(tensors_in(static), tensors_in(values), strict=True):
            if one is not two:
                repeats = [size > 1 and stride == 0 for size, stride in zip(one.shape, one.stride(), strict=True)]
                once = tuple(slice(1) if is_repeated else slice(None) for is_repeated in repeats)
                one.detach()[once].copy_(two.detach()[once])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
