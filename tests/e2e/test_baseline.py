"""The baseline is a real step of a real model, and its numbers are those that were measured."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kitsune.errors import SettingsError
from tests.benchmarks import BenchmarkConfig, BenchmarkResult, baseline, run_baseline_benchmark

ROOT = Path(__file__).parents[2]
FEW = BenchmarkConfig(batch_size=8, num_iterations=5, warmup_iterations=1, device="cpu")


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


@pytest.mark.parametrize(
    "numbers", [{"batch_size": 0}, {"num_iterations": 0}, {"num_iterations": 2.0}, {"warmup_iterations": -1}]
)
def test_numbers_that_make_no_sense_are_refused_by_name(numbers):
    with pytest.raises(SettingsError, match=rf"BenchmarkConfig\.{next(iter(numbers))} is "):
        BenchmarkConfig(**numbers)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "tests.benchmarks.baseline", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.minutes
def test_it_runs_as_a_module_and_says_nothing_else():
    done = run("--models", "mlp", "--iterations", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MLP on ")
    assert done.stderr == ""


@pytest.mark.parametrize("words", [("--iterations", "0"), ("--batch-size", "-1"), ("--models",)], ids=" ".join)
def test_a_command_that_makes_no_sense_is_a_wrong_use(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["baseline", *words])
    with pytest.raises(SystemExit) as ended:
        baseline.main()
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
