"""Which kernels a function runs on the GPU, and how long they take, by torch.profiler."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.autograd.profiler import profile

from kitsune.errors import CaptureError

#: Copies and fills by the driver. They are not compared: their number depends on how a step is issued.
MOVES: Final = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or a copy or fill by the driver, with its begin and duration on the GPU."""

    name: str
    begin_us: float
    took_us: float


def timeline(function: Callable[[], Any]) -> list[Kernel]:
    """Runs the function once under torch.profiler. Returns what ran on the GPU, sorted by begin.

    Raises CaptureError when another profiler is running, or when no kernel was seen.
    """
    if _profiler_enabled():
        raise CaptureError("launches cannot be counted while another torch.profiler is running; stop it first")
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_kineto=True, use_cpu=False) as profiled:
        function()
        torch.cuda.synchronize()
    kernels = ran_on(DeviceType.CUDA, profiled)
    if not kernels:
        raise CaptureError("torch.profiler sees no kernels: another tool holds the GPU's performance interface")
    return kernels


def ran_on(device_type: DeviceType, profiled: profile) -> list[Kernel]:
    """What ran on such a device, sorted by begin, without annotations of the user's.

    Read from Kineto's results directly: torch.profiler builds an event tree with the host's work, which took 0.4 to
    1.1 s for the 4 700 kernels of three issues of BERT-base.
    """
    results = profiled.kineto_results
    events = results.events() if results is not None else ()
    seen = (event for event in events if event.device_type() == device_type and not event.is_user_annotation())
    kernels = [Kernel(event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3) for event in seen]
    return sorted(kernels, key=lambda kernel: kernel.begin_us)


def kernels_of(function: Callable[[], Any]) -> Counter[str]:
    """How often each kernel runs, by name."""
    return Counter(kernel.name for kernel in timeline(function) if not kernel.name.startswith(MOVES))


def difference(expected: Counter[str], found: Counter[str]) -> str:
    """Which kernels of `expected` are not in `found`, in words; "" if there are none."""
    missing = expected - found
    if not missing:
        return ""
    name, count = missing.most_common(1)[0]
    return f"{sum(missing.values())} kernels are launched without being recorded, among them {count} of {name[:100]}"
