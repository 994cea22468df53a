"""Captures the launches of a function into a CUDA graph that can be replayed.

On a CPU, `HostGraph` runs the function again and writes the results into the tensors of the first run, so that code
built on static buffers can be tested without a GPU.
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
    """Recorded launches that can be replayed on the tensors they were recorded with."""

    def replay(self) -> None: ...


class Recorder:
    """Captures functions into graphs that share one memory pool.

    `executes`: whether capturing also executes the function (true on a CPU, false on CUDA). `is_short_lived`: garbage
    is not collected before a capture, since its graphs are dropped soon.
    """

    def __init__(self, device: torch.device, *, is_short_lived: bool = False) -> None:
        self.device = device
        self.executes = device.type != "cuda"
        self._is_short_lived = is_short_lived
        self._pool: Any = None
        self._graphs: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()

    def taken_bytes(self) -> int:
        """Bytes reserved on the GPU by the pool of its graphs, including free blocks and library workspaces."""
        # Not torch.cuda.memory_snapshot(pool): torch loses the statistics of a pool passed to it (pytorch#196366).
        segments = torch.cuda.memory_snapshot() if self._pool is not None else []
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self._pool))

    def apart(self) -> "Recorder":
        """Another recorder for the same device, for short-lived graphs that share no memory with this one's."""
        return Recorder(self.device, is_short_lived=True)

    def capture(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of what `function` launches, and its result, whose tensors every replay overwrites.

        Raises CaptureError. The device's random generator and current stream stay usable after a failure.
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
            first = error.__context__ or error  # ending a failed capture raises another error
            raise CaptureError(f"CUDA graph capture failed: {first_line(first)}") from error

    def _leave_pool(self) -> None:
        """Ends the allocator's capture mode, which a failed capture leaves on: in it some blocks are never freed."""
        index = self.device.index or 0
        with contextlib.suppress(RuntimeError):  # it has ended already
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)

    def _mend_generator(self) -> None:
        """A failed capture leaves the generator in capture mode ("offset increment outside graph capture"); a
        successful one ends it. Replacing the generator's state instead would detach the graphs that draw from it."""
        # If this fails too, the GPU is lost; the error that is being raised says why.
        with contextlib.suppress(RuntimeError), self._capturing(torch.cuda.CUDAGraph()):
            torch.cuda._sleep(1)

    def _captured(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        # cuBLAS keeps its workspaces in a process-wide table, which Inductor's graphs clear at any time. A graph whose
        # workspace came from there would go on writing to memory that has been reused (seen on an H200: an illegal
        # access). With the table empty, the workspace is allocated from the graph's own pool.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            if not self._is_short_lived:
                gc.collect()  # frees reference cycles for the graph; takes 0.25 s once Inductor is loaded
            with uncollected():  # destroying a CUDA graph during a capture breaks the capture
                return self._graph_of(function)
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def _graph_of(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        if not self._graphs:  # a pool is freed with its last graph
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
        # torch.cuda.graph does not restore the stream when ending a failed capture raises: the outer context does.
        # thread_local: a data loader's pinning thread may call CUDA during the capture.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
        # A capture first sets the graph's random seed and offset, on this stream. If that ran after the first replay,
        # which is on another stream, the replay would repeat random numbers: some did with ten processes on an H200.
        stream.synchronize()


class DeviceGraph:
    """A CUDA graph that replays on its own GPU, whichever GPU is current."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph = graph
        self._device = device

    def replay(self) -> None:
        if torch.cuda.current_device() == self._device.index:  # the usual case, without the cost of a context manager
            self._graph.replay()
            return
        with torch.cuda.device(self._device):
            self._graph.replay()


class HostGraph:
    """The CPU equivalent of a CUDA graph: runs the function again, with the same aliasing rules."""

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
    """Copies tensors into the tensors at the same positions of another pytree."""
    with torch.no_grad():
        for one, two in zip(tensors_in(static), tensors_in(values), strict=True):
            if one is not two:
                repeats = [size > 1 and stride == 0 for size, stride in zip(one.shape, one.stride(), strict=True)]
                once = tuple(slice(1) if is_repeated else slice(None) for is_repeated in repeats)
                one.detach()[once].copy_(two.detach()[once])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
