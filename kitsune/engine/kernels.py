"""A function in, the kernels that it runs on the GPU out, as the profiler saw them."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.autograd.profiler import profile

from kitsune.errors import CaptureError

#: Copies and fills by the driver: how many there are is a matter of how a step is issued.
MOVES: Final = ("Memcpy", "Memset")
#: With this set to 1, Kineto finalizes CUPTI when a profile ends. Attached, it makes launches by the host slower: a
#: BERT-base as given took 41 ms before a look and 52 after it (benchmarks/results/profiled/2026-11-28-h200.jsonl).
TEARDOWN: Final = "TEARDOWN_CUPTI"
#: torch tells of crashes with CUDA graphs before.
TEARDOWN_FROM_CUDA: Final = 13


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
    with cupti_finalized() as is_finalized:
        if is_finalized:  # a look that follows one without sees nothing: let that be this one
            seen(lambda: torch.empty(1, device="cuda").zero_())
        kernels = seen(function)
    if not kernels:
        raise CaptureError("torch.profiler sees no kernels: another tool holds the GPU's performance interface")
    return kernels


@contextmanager
def cupti_finalized() -> Iterator[bool]:
    """CUPTI is finalized after each profile in here, as far as torch can: what is yielded."""
    if not can_finalize(torch.version.cuda):
        yield False
        return
    before = os.environ.get(TEARDOWN)
    os.environ[TEARDOWN] = "1"
    try:
        yield True
    finally:
        if before is None:
            del os.environ[TEARDOWN]
        else:
            os.environ[TEARDOWN] = before


def can_finalize(cuda: str | None) -> bool:
    """Of torch.version.cuda, as "13.0"."""
    return cuda is not None and int(cuda.partition(".")[0]) >= TEARDOWN_FROM_CUDA


def seen(function: Callable[[], Any]) -> list[Kernel]:
    """What torch.profiler has seen of one run, by the time at which it began."""
    torch.cuda.synchronize()
    with profile(use_device="cuda", use_kineto=True, use_cpu=False) as profiled:
        function()
        torch.cuda.synchronize()
    return ran_on(DeviceType.CUDA, profiled)


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
