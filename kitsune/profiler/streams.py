"""StreamProfiler: how busy each CUDA stream is while a function runs, and how much the streams overlap."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from kitsune.device.backend import pick_device, synchronize
from kitsune.errors import CaptureError, UnfitError
from kitsune.launches.execution.kernel_trace import MOVES
from kitsune.profiler.columns import columns, shown

Span = tuple[float, float]  # begin and end, in us


@dataclass(frozen=True, slots=True)
class StreamUse:
    """Use of one stream, by its CUDA id. `moves`: copies and memsets, which count as busy time too."""

    stream: int
    busy_ms: float
    kernels: int
    moves: int


@dataclass(frozen=True, slots=True)
class StreamProfile:
    """What ran on the streams of a GPU, the busiest first.

    `busy_ms`: time in which at least one stream was busy. `overlap_ms`: time in which two or more were.
    """

    streams: tuple[StreamUse, ...]
    busy_ms: float
    overlap_ms: float

    @property
    def kernels(self) -> int:
        """Number of kernels on all streams."""
        return sum(use.kernels for use in self.streams)

    @property
    def overlap_share(self) -> float:
        """`overlap_ms` over `busy_ms`: 0 when streams never overlap, at most 1."""
        return self.overlap_ms / self.busy_ms if self.busy_ms else 0.0

    def __str__(self) -> str:
        rows = [(str(use.stream), shown(use.busy_ms), str(use.kernels), str(use.moves)) for use in self.streams]
        table = columns(("stream", "busy ms", "kernels", "copies and fills"), rows)
        overlap = f"Two or more streams are busy for {shown(self.overlap_ms)} ms, {self.overlap_share:.1%}"
        return f"{table}\n{overlap} of the {shown(self.busy_ms)} ms in which any is."


class StreamProfiler:
    """Profiles the streams on which a function runs, with torch.profiler.

    `device` is a GPU or its name; by default the current one. Raises UnfitError when it does not exist or is a CPU.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)
        if self.device.type != "cuda":
            raise UnfitError("a CPU has no CUDA streams, so there is nothing to profile; give a GPU as the device")
        self._function = function

    def run(self) -> StreamProfile:
        """Runs the function once, without a warm-up run, and waits for the GPU.

        Raises CaptureError when another profiler is running, or no kernel was seen.
        """
        watch = StreamWatch(self.device)
        try:
            self._function()
        except BaseException:
            watch.drop()
            raise
        return watch.end()


class StreamWatch:
    """Profiles the streams of a GPU from now until `end`. Waits for the GPU at both ends.

    Raises CaptureError when another profiler is running.
    """

    def __init__(self, device: torch.device) -> None:
        if _profiler_enabled():
            raise CaptureError("torch.profiler is running, and only one can; leave it first")
        self._device = device
        synchronize(device)
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._profile.start()

    def end(self) -> StreamProfile:
        """Stops, and returns what ran. Raises CaptureError when no kernel was seen."""
        try:
            synchronize(self._device)
        finally:
            self.drop()
        found = profile_of(self._profile.events(), self._device.index)
        if not found.streams:
            raise CaptureError("torch.profiler sees no kernels: none ran, or another tool holds the GPU's interface")
        return found

    def drop(self) -> None:
        """Stops and discards the result."""
        self._profile.stop()


def profile_of(events: Iterable[FunctionEvent], device_index: int) -> StreamProfile:
    """The profile of one GPU from profiler events. User annotations are ignored."""
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    moves: defaultdict[int, int] = defaultdict(int)
    for event in events:
        there = event.device_type == DeviceType.CUDA and event.device_index == device_index
        if there and not event.is_user_annotation:
            spans[event.device_resource_id].append((event.time_range.start, event.time_range.end))
            moves[event.device_resource_id] += event.name.startswith(MOVES)
    uses = [
        StreamUse(stream, busy_us([ran], 1) / 1e3, len(ran) - moves[stream], moves[stream])
        for stream, ran in spans.items()
    ]
    return StreamProfile(
        streams=tuple(sorted(uses, key=lambda use: (-use.busy_ms, use.stream))),
        busy_ms=busy_us([*spans.values()], 1) / 1e3,
        overlap_ms=busy_us([*spans.values()], 2) / 1e3,
    )


def busy_us(streams: Sequence[Iterable[Span]], at_least: int) -> float:
    """Time in us in which at least so many streams were busy. Overlapping spans of one stream count once."""
    steps: defaultdict[float, int] = defaultdict(int)
    for ran in streams:
        for begin, end in _joined(ran):
            steps[begin] += 1
            steps[end] -= 1
    total_us, busy = 0.0, 0
    for (moment, step), (following, _) in pairwise(sorted(steps.items())):
        busy += step
        if busy >= at_least:
            total_us += following - moment
    return total_us


def _joined(spans: Iterable[Span]) -> Sequence[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
