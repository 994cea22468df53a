"""What one process has compiled is found by the next one."""

import os
import subprocess
import sys
from pathlib import Path

from torch import nn
from torch._dynamo.utils import counters

from kitsune.fusion import benefit
from tests.unit.kitsune.fusion.fused import ROWS, Activated, Norm, engine, step
from tests.unit.kitsune.fusion.test_cache_key import cache  # noqa: F401


def hits_of_a_process():
    """How often AOTAutograd's cache was hit by a model with several calls of ours."""
    fusing, model = engine(compiler="inductor"), nn.Sequential(Norm(), Activated())
    benefit.measure = lambda *_: benefit.Benefit(2.0, 1.0)  # it would compile every call by itself, twice
    counters.clear()
    step(fusing.fuse(model), list(model.parameters()), ROWS)
    assert len(fusing.get_fusion_stats().matches) == 2
    return counters["aot_autograd"]["autograd_cache_hit"]


def test_processes_come_to_the_same_keys():
    found = []
    for seed in ("1", "2"):
        program = "from tests.e2e.kitsune.fusion.test_cache_key import hits_of_a_process; print(hits_of_a_process())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[4],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    assert found == [0, 1]
