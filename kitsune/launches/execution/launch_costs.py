"""Times each launch of a recording alone."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch

from kitsune.errors import CaptureError
from kitsune.launches.execution.issue import Memory
from kitsune.launches.execution.kernel_trace import Kernel, timeline
from kitsune.launches.model.recording import Recording

ROUNDS: Final = 3
MARK: Final = "spin_kernel"  # kernel of torch.cuda._sleep, issued as a mark behind each launch
#: From the end of a kernel to the begin of the next one in a CUDA graph on an H200: 260 kernels of ResNet-18 take
#: 2499 us one by one and 2576 us in a graph, 767 of GoogLeNet 3651 and 3906, 48 of LeNet 230 and 229.
START_US: Final = 0.3


def measured_us(recording: Recording) -> list[float]:
    """The shortest of ROUNDS times of each launch, in us. The step's state changes.

    Raises CaptureError when torch.profiler did not see every launch.
    """
    timed = on_gpu if recording.device.type == "cuda" else on_host
    times_us = timed(tasks_of(recording))
    count = len(recording.calls)
    if len(times_us) != count * ROUNDS:
        raise CaptureError(f"torch.profiler saw the ends of {len(times_us)} launches of {count * ROUNDS}")
    return [min(times_us[launch::count]) for launch in range(count)]


def tasks_of(recording: Recording) -> Iterator[Callable[[], None]]:
    """A function to issue each launch, for ROUNDS rounds; each round begins without the step's own storages."""
    for _ in range(ROUNDS):
        memory = Memory(recording)
        for call in recording.calls:
            yield memory.task(call, ())


def on_gpu(tasks: Iterator[Callable[[], None]]) -> list[float]:
    """By the GPU's clock. Events around each launch would time the host: 10.7 ms for a step of 2.6 ms (ResNet-18)."""
    return between_marks(timeline(lambda: marked(tasks)))


def marked(tasks: Iterable[Callable[[], None]]) -> None:
    for task in tasks:
        task()
        torch.cuda._sleep(1)


def between_marks(kernels: Iterable[Kernel]) -> list[float]:
    """The time in us of the kernels before each mark, with START_US for each kernel."""
    times_us = [0.0]
    for kernel in kernels:
        if MARK in kernel.name:
            times_us.append(0.0)
        else:
            times_us[-1] += kernel.took_us + START_US
    return times_us[:-1]


def on_host(tasks: Iterator[Callable[[], None]]) -> list[float]:
    return [host_us(task) for task in tasks]


def host_us(task: Callable[[], None]) -> float:
    begin = time.perf_counter()
    task()
    return (time.perf_counter() - begin) * 1e6
