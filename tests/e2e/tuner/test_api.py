"""The first use of the tuner in a process of its own."""

import subprocess
import sys

import pytest

FIRST_USE = """
import random
import kitsune
import torch
random.seed(1)
before = random.getstate()
tune = kitsune.tune
assert random.getstate() == before, "the import drew"
from tuner import api
api.to_archive = lambda _: random.random()
model = torch.nn.Linear(4, 2)
try:
    tune(model, lambda y, z: 0, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(1, 4), None))
except AttributeError:  # a number is no archive
    assert random.getstate() == before, "the call drew"
    print("seen")
"""


@pytest.mark.minutes
def test_the_first_use_in_a_process_draws_nothing_from_the_random_of_python():
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr
