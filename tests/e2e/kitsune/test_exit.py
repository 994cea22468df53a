"""A training script may end without closing its step: Python then says nothing about it."""

import subprocess
import sys

SCRIPT = """
import torch
from kitsune import KitsuneOptimizer, Plan, TrainStep
model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
plan = Plan.by_hand(compile="default", precision="bf16")
step = TrainStep(model, torch.nn.functional.mse_loss, torch.optim.AdamW(model.parameters()), plan)
optimizer = KitsuneOptimizer(torch.optim.AdamW(other.parameters()), plan=plan)
other(torch.ones(2, 4))
"""


def test_nothing_is_printed_at_the_end():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
