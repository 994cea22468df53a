"""profile=True on a GPU: graphs against the loop as given, and their memory; marking a step waits for nothing."""

import math
import os

import pytest
import torch
from torch import nn

from kitsune import KitsuneOptimizer
from kitsune.runtime.step_profile import CALIBRATION_STEPS, COLD_STEPS, StepProfile


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times a GPU of its own: run it with -n 0")
def test_a_loop_that_waits_for_launches_is_faster_by_graphs(device):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]).to(device)
    optimizer = KitsuneOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), profile=True)
    x, y = torch.randn(32, 64, device=device), torch.randn(32, 64, device=device)
    for _ in range(CALIBRATION_STEPS + 60):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    stats = optimizer.get_stats()
    assert optimizer.report.applied == {"capture": "segments"}
    assert stats.missing.keys() == {"overlap"}  # all of it runs on one stream
    assert min(stats.given_launches, stats.planned_launches) > 36  # 12 layers: a product forward, two backward
    assert 0.0 <= stats.given_hit_rate <= 1.0
    assert optimizer.profiler.streams.kernels == stats.planned_launches
    assert stats.speedup > 1.2  # 60 launches of a few us each wait for the host
    assert math.isfinite(stats.memory_saved_mb)
    assert stats.planned_peak_bytes > sum(parameter.nbytes for parameter in model.parameters())
    optimizer.close()


def test_marking_a_step_does_not_wait_for_the_gpu(device):
    profile = StepProfile(device)
    for _ in range(COLD_STEPS + 1):
        profile.mark(by_plan=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(CALIBRATION_STEPS - COLD_STEPS - 3):  # the last step as given is counted, which waits
            profile.mark(by_plan=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not profile.is_calibrated
