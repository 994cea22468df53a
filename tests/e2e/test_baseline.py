"""The baseline is a real step of a real model, and its numbers are those that were measured."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kitsune.errors import SettingsError
from tests.benchmarks import BenchmarkConfig, BenchmarkResult, run_baseline_benchmark
from tests.benchmarks.models import MODELS, create_mlp

ROOT = Path(__file__).parents[2]
FEW = BenchmarkConfig(batch_size=8, num_iterations=5, warmup_iterations=1, device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_timed_and_trained(name):
    model = MODELS[name]()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = run_baseline_benchmark(model, FEW)
    assert len(result.step_ms) == 5
    assert min(result.step_ms) > 0
    assert result.peak_bytes is None
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_summary_says_what_was_measured():
    result = BenchmarkResult("MLP", "cpu", 64, (2.0, 4.0, 3.0), None)
    assert result.median_ms == 3.0
    assert "3.000 ms a step" in result.summary()
    assert "21,333 samples/s" in result.summary()


def test_a_model_of_the_users_needs_a_batch():
    model = nn.Linear(4, 3)
    with pytest.raises(SettingsError, match="pass batch="):
        run_baseline_benchmark(model, FEW)
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    assert run_baseline_benchmark(model, FEW, batch).batch_size == 6


def test_twice_the_work_takes_longer():
    """Not a constant: a batch of 2048 against one of 8."""
    small = run_baseline_benchmark(create_mlp(), FEW)
    large = run_baseline_benchmark(
        create_mlp(), BenchmarkConfig(batch_size=2048, num_iterations=5, warmup_iterations=1, device="cpu")
    )
    assert large.median_ms > small.median_ms


def test_it_runs_as_a_module():
    words = ["-m", "tests.benchmarks.baseline", "--models", "mlp", "--iterations", "3"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MLP on ")
