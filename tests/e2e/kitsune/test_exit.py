"""A training script may end without closing its step: Python then says nothing about it."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from kitsune import KitsuneOptimizer, Plan, TrainStep
model = torch.nn.Linear(4, 4)
optimizer, plan = torch.optim.AdamW(model.parameters()), Plan.by_hand(compile="default", precision="bf16")
"""
MADE = {
    "step": "step = TrainStep(model, torch.nn.functional.mse_loss, optimizer, plan)",
    "drop-in": "step = KitsuneOptimizer(optimizer, plan=plan); model(torch.ones(2, 4))",
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_nothing_is_printed_at_the_end(made):
    done = subprocess.run([sys.executable, "-c", SCRIPT + made], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
