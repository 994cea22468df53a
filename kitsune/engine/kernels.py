"""A function in, the kernels that it launches on the GPU out, counted by name."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

#: Copies and fills by the driver: how many there are is a matter of how a step is issued.
MOVES: Final = ("Memcpy", "Memset")


def kernels_of(function: Callable[[], Any]) -> Counter[str]:
    """Runs the function once under torch.profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    names = (event.name for event in profiled.events() if event.device_type is DeviceType.CUDA)
    return Counter(name for name in names if not name.startswith(MOVES))


def difference(expected: Counter[str], found: Counter[str]) -> str:
    """What the second has not, in words, or ""."""
    missing = expected - found
    if not missing:
        return ""
    name, count = missing.most_common(1)[0]
    return f"{sum(missing.values())} kernels are launched out of our sight, among them {count} of {name[:100]}"
