"""The plain training step of a model, timed: forward, cross-entropy, backward and AdamW, float32, no graphs.

python -m tests.benchmarks.baseline                     MLP, LeNet-5 and ResNet-18
python -m tests.benchmarks.baseline --models mlp --iterations 300
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kitsune.device.backend import peak_bytes, pick_device, reset_peak, synchronize
from kitsune.errors import SettingsError
from tests.benchmarks.models import MODELS


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkConfig:
    """`device` None: the GPU if there is one. Warm-up iterations are not timed.

    Raises SettingsError for numbers that make no sense.
    """

    batch_size: int = 64
    num_iterations: int = 100
    warmup_iterations: int = 10
    learning_rate: float = 1e-3
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("num_iterations", 1), ("warmup_iterations", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise SettingsError(f"BenchmarkConfig.{name} is {value!r}; it must be a whole number, at least {least}")


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Milliseconds of every timed iteration; `peak_bytes` in tensors, None on a CPU, where torch counts none."""

    name: str
    device: str
    batch_size: int
    step_ms: tuple[float, ...]
    peak_bytes: int | None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    def summary(self) -> str:
        low, *_, high = statistics.quantiles(self.step_ms, n=10) if len(self.step_ms) > 1 else self.step_ms * 2
        memory = "" if self.peak_bytes is None else f", {self.peak_bytes / 2**20:.0f} MiB"
        return (
            f"{self.name} on {self.device}, batch {self.batch_size}: {self.median_ms:.3f} ms a step "
            f"(80 % between {low:.3f} and {high:.3f}), {self.batch_size / self.median_ms * 1e3:,.0f} samples/s{memory}"
        )


def run_baseline_benchmark(
    model: nn.Module, config: BenchmarkConfig | None = None, batch: tuple[Tensor, Tensor] | None = None
) -> BenchmarkResult:
    """Times the step of a model on `batch`, or on one that the model draws. The model is trained meanwhile.

    Raises SettingsError when there is neither a batch nor a model of tests/benchmarks/models.py.
    """
    config = config or BenchmarkConfig()
    device = pick_device(config.device)
    if batch is None:
        draw: Any = getattr(model, "example_batch", None)
        if draw is None:
            raise SettingsError("the model does not say what a batch is; pass batch=(x, y)")
        batch = draw(config.batch_size)
    model.to(device)
    x, y = (tensor.to(device) for tensor in batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(config.warmup_iterations):
        step()
    synchronize(device)
    reset_peak(device)
    step_ms = tuple(timed_ms(step, device) for _ in range(config.num_iterations))
    peak = peak_bytes(device) if device.type == "cuda" else None
    return BenchmarkResult(type(model).__name__, str(device), len(x), step_ms, peak)


def timed_ms(step: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def at_least_one(text: str) -> int:
    """A number of the command line. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batch-size", type=at_least_one, default=64)
    parser.add_argument("--iterations", type=at_least_one, default=20)
    options = parser.parse_args()
    config = BenchmarkConfig(batch_size=options.batch_size, num_iterations=options.iterations, warmup_iterations=3)
    for name in options.models:
        torch.manual_seed(0)
        print(run_baseline_benchmark(MODELS[name](), config).summary(), flush=True)


if __name__ == "__main__":
    main()
