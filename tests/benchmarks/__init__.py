"""The plain training step of a model, timed: what anything faster has to beat.

Public names are bound lazily: `python -m tests.benchmarks.baseline` must find its module not loaded yet.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["BenchmarkConfig", "BenchmarkResult", "run_baseline_benchmark"]

if TYPE_CHECKING:
    from tests.benchmarks.baseline import BenchmarkConfig as BenchmarkConfig
    from tests.benchmarks.baseline import BenchmarkResult as BenchmarkResult
    from tests.benchmarks.baseline import run_baseline_benchmark as run_baseline_benchmark


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tests.benchmarks' has no attribute {name!r}")
    return getattr(importlib.import_module("tests.benchmarks.baseline"), name)
