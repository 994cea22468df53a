"""A Recording in, how long each of its launches takes alone out."""

import time
from collections.abc import Callable

import torch

from kitsune.engine.issue import Memory
from kitsune.engine.record import Recording

ROUNDS = 3
LEAD_CYCLES = 150_000  # the GPU sleeps while the host gets ahead, or it would time the host
EVENT_US = 2.0  # between two events with nothing in between, on an H200
LEAST_US = 1.2


def measured_us(recording: Recording) -> list[float]:
    """The shortest of three issues of each launch, in us. The step's state changes meanwhile."""
    timed = on_gpu if recording.device.type == "cuda" else on_host
    rounds = []
    for _ in range(ROUNDS):
        memory = Memory(recording)
        rounds.append([timed(memory.task(call, ())) for call in recording.calls])
    return [min(times) for times in zip(*rounds, strict=True)]


def on_gpu(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return max(LEAST_US, start.elapsed_time(end) * 1e3 - EVENT_US)


def on_host(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e6
