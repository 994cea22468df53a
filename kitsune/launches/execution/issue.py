"""Issues the launches of a recording on lanes, by a schedule and a memory plan.

A lane is a stream, or on a CPU a thread: its launches run in the order of issue. The step's own storages are allocated
on the lane of the launch that makes them, and released there by the plan. Torch's allocator reuses a block on the same
stream only, so memory is never reused too early.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol

import torch
from torch.utils import _pytree as pytree

from kitsune.device.backend import lane_stream
from kitsune.errors import CaptureError
from kitsune.launches.model.recording import Call, Recording, TensorView, map_places
from kitsune.launches.planning.memory_plan import MemoryPlan, plan_memory
from kitsune.launches.planning.schedule import Schedule, in_order

#: The dispatcher's autocast keys. Calls are recorded below autocast, with arguments already cast, so they are excluded.
AUTOCAST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


class Lanes(Protocol):
    """Where launches are issued. A context manager: on exit, all work has ended or is ordered before what follows."""

    def __enter__(self) -> "Lanes": ...

    def __exit__(self, *_: object) -> None: ...

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        """Issues `run` behind what was submitted to this lane, and behind the launches in `waits`."""


def issue(recording: Recording, schedule: Schedule, plan: MemoryPlan, lanes: Lanes) -> Any:
    """Issues every launch once. Returns what the step returns, in newly allocated memory.

    Raises CaptureError when a call returns another dtype or shape than in the recorded step.
    """
    memory = Memory(recording)
    maker: dict[int, int] = {}  # own storage -> lane
    due: defaultdict[int, list[int]] = defaultdict(list)  # lane -> storages to release before its next launch
    with lanes:
        for placed, released in zip(schedule.placed, plan.releases, strict=False):
            call = recording.calls[placed.launch]
            for storage in released:
                due[maker[storage]].append(storage)
            for storage in recording.graph.launches[placed.launch].touches:
                maker.setdefault(storage, placed.stream)
            freed = tuple(due.pop(placed.stream, ()))
            lanes.submit(placed.stream, placed.launch, placed.waits, memory.task(call, freed))
    return memory.tensors(recording.result)


def in_recorded_order(recording: Recording) -> Callable[[], Any]:
    """A function that issues every launch once, in the recorded order, on the current stream."""
    schedule = in_order(recording.graph, [0.0] * len(recording.calls))
    plan = plan_memory(recording.graph, schedule)
    return lambda: issue(recording, schedule, plan, HostLane())


class Memory:
    """The storages of one issue: those from before the step, and the step's own while they are allocated."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._storages = dict(recording.held)

    def task(self, call: Call, freed: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            for storage in freed:
                del self._storages[storage]
            self._issue(call)

        return run

    def tensors(self, tree: Any) -> Any:
        return map_places(self._tensor, tree)

    def _issue(self, call: Call) -> None:
        for storage in call.allocates:
            self._storages[storage] = self._allocated(storage)
        with (
            torch.set_grad_enabled(call.in_grad_mode),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._ExcludeDispatchKeyGuard(AUTOCAST),
        ):
            output = call.function(*self.tensors(call.arguments), **self.tensors(call.named))
        if not call.results:
            return
        leaves = (output,) if torch.is_tensor(output) else pytree.tree_leaves(output)
        for leaf, place in zip(leaves, call.results, strict=True):
            if place is not None and torch.is_tensor(leaf):
                if (leaf.dtype, tuple(leaf.shape)) != (place.dtype, tuple(place.size)):
                    raise CaptureError(
                        f"{call.function} gives {leaf.dtype} {tuple(leaf.shape)} when it is issued again, and gave "
                        f"{place.dtype} {tuple(place.size)} in the step"
                    )
                self._storages.setdefault(place.storage, leaf.untyped_storage())

    def _allocated(self, storage: int) -> torch.UntypedStorage:
        nbytes = self._recording.graph.storages[storage].nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self._recording.device).untyped_storage()

    def _tensor(self, place: TensorView) -> torch.Tensor:
        storage = self._storages[place.storage]
        tensor = torch.empty(0, dtype=place.dtype, device=storage.device)
        return tensor.set_(storage, place.offset, place.size, place.stride)


class HostLane:
    """Runs each launch at once, on the calling thread: the counterpart of streams that never overlap."""

    def __enter__(self) -> "HostLane":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        run()


class HostLanes:
    """A thread for each lane: the CPU counterpart of streams, which are ordered by waits only.

    The threads are reused by later issues, and end when this object is freed.
    """

    def __init__(self, count: int) -> None:
        self._workers = [ThreadPoolExecutor(1) for _ in range(count)]
        self._launched: dict[int, Future[None]] = {}

    def __enter__(self) -> "HostLanes":
        return self

    def __exit__(self, *_: object) -> None:
        launched, self._launched = self._launched, {}
        wait(launched.values())
        for each in launched.values():
            each.result()

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        before = [self._launched[other] for other in waits]

        def task() -> None:
            for launched in before:
                launched.result()
            run()

        self._launched[launch] = self._workers[lane].submit(task)


class CudaLanes:
    """Streams that fork from the current one and join it again; in a capture, branches of the graph.

    `priorities`, if any: CUDA priorities of the streams; when the GPU is full, kernels of the lower number begin first.
    `multiprocessors`, if any: how many each stream may use, 0 for all.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        priorities: Sequence[int] = (),
        multiprocessors: Sequence[int] = (),
    ) -> None:
        self._device = device
        self._awaited = schedule.awaited
        index, count = device.index or 0, schedule.streams
        kinds = zip(priorities or [0] * count, multiprocessors or [0] * count, strict=True)
        self._lanes = [lane_stream(index, lane, *kind) for lane, kind in enumerate(kinds)] if count > 1 else []

    def __enter__(self) -> "CudaLanes":
        self._main = torch.cuda.current_stream(self._device)
        self._streams = self._lanes or [self._main]
        self._current = self._main
        self._events: dict[int, torch.cuda.Event] = {}
        others = self._others()
        if others:  # a graph with one root begins sooner: DLRM's step took 0.349 ms in place of 0.361 on an H200
            torch.cuda._sleep(1)
        for stream in others:
            stream.wait_stream(self._main)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._main)
        for stream in self._others():
            self._main.wait_stream(stream)

    def _others(self) -> list[torch.cuda.Stream]:
        return [stream for stream in self._streams if stream != self._main]

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        stream = self._streams[lane]
        for other in waits:
            stream.wait_event(self._events[other])
        if stream is not self._current:  # torch.cuda.stream() would look up the current stream four times a launch
            torch.cuda.set_stream(stream)
            self._current = stream
        run()
        if launch in self._awaited:
            self._events[launch] = stream.record_event()
