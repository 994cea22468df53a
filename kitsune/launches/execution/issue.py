"""A Recording, a Schedule and a MemoryPlan in; the launches of the step, issued again on lanes, out.

A lane is a stream: what is issued on it runs in that order. Own storages are allocated on the lane of the launch that
makes them and let go on it, by the plan, so that torch's allocator, which gives a block again to the same stream only,
never gives it too early.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol

import torch
from torch.utils import _pytree as pytree

from kitsune.device.backend import lane_stream
from kitsune.errors import CaptureError
from kitsune.launches.model.recording import Call, Place, Recording, map_places
from kitsune.launches.planning.memory_plan import MemoryPlan, plan_memory
from kitsune.launches.planning.schedule import Schedule, in_order

#: The dispatcher's keys of autocast: what was recorded was seen below them, with its arguments cast already.
AUTOCAST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


class Lanes(Protocol):
    """Where launches go. Used as a context: everything has ended, or is ordered before what follows, at its end."""

    def __enter__(self) -> "Lanes": ...

    def __exit__(self, *_: object) -> None: ...

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        """Runs after what was submitted to this lane, and after the launches in `waits`."""


def issue(recording: Recording, schedule: Schedule, plan: MemoryPlan, lanes: Lanes) -> Any:
    """Issues every launch once, and returns what the step returns, in memory of this issue."""
    memory = Memory(recording)
    maker: dict[int, int] = {}  # own storage -> lane
    due: defaultdict[int, list[int]] = defaultdict(list)  # lane -> storages that its next launch lets go
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
    """A function that issues every launch once, one after the other, as they were recorded."""
    schedule = in_order(recording.graph, [0.0] * len(recording.calls))
    plan = plan_memory(recording.graph, schedule)
    return lambda: issue(recording, schedule, plan, HostLane())


class Memory:
    """The storages of one issue: those that were there before, and the step's own as they come and go."""

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

    def _tensor(self, place: Place) -> torch.Tensor:
        storage = self._storages[place.storage]
        tensor = torch.empty(0, dtype=place.dtype, device=storage.device)
        return tensor.set_(storage, place.offset, place.size, place.stride)


class HostLane:
    """One after the other, on the host: the CPU twin of streams that never overlap."""

    def __enter__(self) -> "HostLane":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        run()


class HostLanes:
    """A thread for each lane: the CPU twin of streams that overlap as they like, with waits as their only order.

    The threads stay for the next issue, and end when these lanes are let go of.
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
    """Streams that fork from the current one and join it again; under capture, branches of the graph.

    `priorities`, if any, are those of the streams as CUDA counts them: of kernels that wait for room on the GPU, those
    with a lower number begin first. `multiprocessors`, if any, are how many of the GPU's each may use, 0 for all.
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
        if others:  # a graph that has one root begins sooner: DLRM's step took 0.349 ms in place of 0.361 on an H200
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
        if stream is not self._current:  # a context around each launch looks the current one up four times
            torch.cuda.set_stream(stream)
            self._current = stream
        run()
        if launch in self._awaited:
            self._events[launch] = stream.record_event()
