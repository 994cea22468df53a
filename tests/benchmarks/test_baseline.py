"""The baseline is a real step of a real model: pytest tests/benchmarks -m benchmark."""

import pytest
import torch

from tests.benchmarks import BenchmarkConfig, run_baseline_benchmark
from tests.benchmarks.models import MODELS, create_mlp

FEW = BenchmarkConfig(batch_size=8, num_iterations=5, warmup_iterations=1, device="cpu")
pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.minutes] * (name == "resnet18")) for name in MODELS]
)
def test_every_model_is_timed_and_trained(name):
    model = MODELS[name]()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = run_baseline_benchmark(model, FEW)
    assert len(result.step_ms) == 5
    assert min(result.step_ms) > 0
    assert result.peak_bytes is None
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_twice_the_work_takes_longer():
    """Not a constant: a batch of 2048 against one of 8."""
    small = run_baseline_benchmark(create_mlp(), FEW)
    large = run_baseline_benchmark(
        create_mlp(), BenchmarkConfig(batch_size=2048, num_iterations=5, warmup_iterations=1, device="cpu")
    )
    assert min(large.step_ms) > min(small.step_ms)  # whatever else the machine did only adds
