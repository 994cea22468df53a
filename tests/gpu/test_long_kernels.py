"""Coordinate descent tunes the long kernels of a step alone: fewer measurements, and none in the next process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kitsune import Plan, TrainStep
from kitsune.techniques import compile as compile_technique
from kitsune.techniques.long_kernels import SWITCH

ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 16384, 4096  # 256 MiB: more than 50 us to read
STEPS = 3


class Waves(nn.Module):
    """Long element-wise kernels, and short ones that finish the sums of loss and gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1, WIDTH))

    def forward(self, x):
        return (x * self.scale).tanh().exp()


def squares(output, target):
    return (output - target).square().mean()


def trained(**knobs):
    """The losses of a few steps, and how often a kernel was measured to tune it."""
    torch.manual_seed(0)
    model = Waves().to("cuda")
    x, target = torch.randn(ROWS, WIDTH, device="cuda"), torch.zeros(1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    with TrainStep(model, squares, optimizer, Plan.by_hand(**knobs)) as step:
        losses = [step(x, target).item() for _ in range(STEPS)]
        assert step.report.declined == {}
    return {"losses": losses, "measured": counters["inductor"]["coordesc_tuning_bench"]}


def without_the_limit():
    """As torch tunes with its own switch."""
    options = {**compile_technique.options_of("coordinate-descent"), SWITCH: True}
    compile_technique.options_of = lambda choice: options


def in_a_process(folder, first=""):
    code = f"""
import json
from tests.gpu import test_long_kernels as here
{first}
print(json.dumps(here.trained(compile="coordinate-descent")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_fewer_kernels_are_measured_and_none_in_the_next_process(device, tmp_path):
    whole = in_a_process(tmp_path / "whole", "here.without_the_limit()")
    limited = in_a_process(tmp_path / "limited")
    again = in_a_process(tmp_path / "limited")
    plain = trained()
    assert plain["losses"][-1] < plain["losses"][0]
    for one in (whole, limited, again):
        assert one["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert 0 < limited["measured"] < whole["measured"]
    assert again["measured"] == 0
