"""Tools to measure time and memory of a training loop: timers, memory tracking, metrics, reports, stream use.

Public names are bound lazily, as in `kitsune`: `python -m kitsune.profiler.memory_tracker` requires that the module is
not loaded yet. Importing this package does not install hooks in torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "CUDATimer": "kitsune.profiler.timer",
    "MemoryTracker": "kitsune.profiler.memory_tracker",
    "MetricsCollector": "kitsune.profiler.metrics",
    "Reporter": "kitsune.profiler.reporter",
    "StreamProfiler": "kitsune.profiler.streams",
    "compare_runs": "kitsune.profiler.compare",
}
__all__ = ["CUDATimer", "MemoryTracker", "MetricsCollector", "Reporter", "StreamProfiler", "compare_runs"]

if TYPE_CHECKING:
    from kitsune.profiler.compare import compare_runs as compare_runs
    from kitsune.profiler.memory_tracker import MemoryTracker as MemoryTracker
    from kitsune.profiler.metrics import MetricsCollector as MetricsCollector
    from kitsune.profiler.reporter import Reporter as Reporter
    from kitsune.profiler.streams import StreamProfiler as StreamProfiler
    from kitsune.profiler.timer import CUDATimer as CUDATimer


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kitsune.profiler' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
