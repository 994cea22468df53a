"""A function in, the kernels that it runs on the GPU out, as the profiler saw them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.autograd.profiler import profile

from kitsune.errors import CaptureError

#: Copies and fills by the driver: how many there are is a matter of how a step is issued.
MOVES: Final = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or a copy or fill by the driver, with the time it took on the GPU."""

    name: str
    begin_us: float
    took_us: float


def timeline(function: Callable[[], Any]) -> list[Kernel]:
    """Runs the function once under torch.profiler; what ran, by the time at which it began.

    Raises CaptureError where another profiler is in the way.
    """
    if _profiler_enabled():
        raise CaptureError("torch.profiler is running, and only one can: launches are counted by it")
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_kineto=True, use_cpu=False) as profiled:
        function()
        torch.cuda.synchronize()
    kernels = ran_on(DeviceType.CUDA, profiled)
    if not kernels:
        raise CaptureError("torch.profiler sees no kernels: another tool holds the GPU's performance interface")
    return kernels


def ran_on(device_type: DeviceType, profiled: profile) -> list[Kernel]:
    """What ran there, by the time at which it began; ranges that are only names of parts are none of it.

    Read from Kineto's own results: torch.profiler makes a tree of them with what the host did, which took 0.4 to 1.1 s
    for the 4 700 kernels of three issues of BERT-base.
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
    """What the second has not, in words, or ""."""
    missing = expected - found
    if not missing:
        return ""
    name, count = missing.most_common(1)[0]
    return f"{sum(missing.values())} kernels are launched out of our sight, among them {count} of {name[:100]}"
