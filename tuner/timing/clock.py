"""The clock of a device for blocks of steps, CUDA events on a GPU, the host's clock on a CPU; and its watches."""

import time

import torch

from kitsune.device.backend import gpu_uuid, synchronize
from tuner.measuring.gpu_watch import watch_gpu
from tuner.measuring.host_watch import HostWatch
from tuner.timing.interleaved_rounds import BlockClock, Step, Watches


class GpuClock:
    """Time between two events in the stream. An untimed step precedes each block, so that the GPU is busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def block_ms(self, step: Step, steps: int) -> float:
        begin, end = (torch.Event(device=self.device, enable_timing=True) for _ in range(2))
        synchronize(self.device)
        step()
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def now_s(self) -> float:
        return time.perf_counter()


class HostClock:
    """Wall-clock time of a CPU. An untimed step precedes each block of several steps, so that caches are warm."""

    def block_ms(self, step: Step, steps: int) -> float:
        if steps > 1:
            step()
        begin = time.perf_counter_ns()
        for _ in range(steps):
            step()
        return (time.perf_counter_ns() - begin) / 1e6

    def now_s(self) -> float:
        return time.perf_counter()


def clock_of(device: torch.device) -> BlockClock:
    return GpuClock(device) if device.type == "cuda" else HostClock()


def watches_of(device: torch.device) -> Watches:
    """Watches the host, and the GPU if the device is one."""
    return Watches(HostWatch(), *([watch_gpu(gpu_uuid(device))] if device.type == "cuda" else []))
