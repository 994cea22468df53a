import os
from statistics import median

import pytest
import torch

from kitsune.device.backend import make_current
from tuner.timing.checkup import STEP
from tuner.timing.planted_slowdown import measured

SECOND = pytest.param(1, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.mark.skipif(WORKERS > 1, reason="other tests use the GPU at the same time; -n 0 tests/gpu/test_checkup.py")
@pytest.mark.parametrize("index", [0, SECOND])
def test_a_planted_slowdown_shows_on_the_gpu_that_is_measured(index, device):
    found = measured(torch.device("cuda", index))
    make_current(device)
    times = {arm.name: median(arm.step_ms) for arm in found.arms}
    assert times["again"] / times[STEP] == pytest.approx(1, abs=0.005)
    assert times["3 % slower"] / times[STEP] == pytest.approx(1.03, abs=0.01)
