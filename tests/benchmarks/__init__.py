"""The plain training step of a model, timed: what anything faster has to beat."""

from tests.benchmarks.baseline import BenchmarkConfig, BenchmarkResult, run_baseline_benchmark

__all__ = ["BenchmarkConfig", "BenchmarkResult", "run_baseline_benchmark"]
