import pytest
import torch

from tuner.numerics import training_trace
from tuner.numerics.training_trace import COPIES, CPU, SHARE, place_for

GPU = torch.device("cuda", 0)
MODEL = torch.nn.Linear(1023, 256)  # 1 MiB
STEP_BYTES = 2**30


@pytest.mark.parametrize(("spare_bytes", "place"), [(0, GPU), (-1, CPU)])
def test_a_trace_stays_on_the_gpu_if_two_steps_fit_beside_it(
    monkeypatch: pytest.MonkeyPatch, spare_bytes: int, place: torch.device
) -> None:
    needed_bytes = 2 * STEP_BYTES + int(COPIES * 2**20 / SHARE)
    monkeypatch.setattr(training_trace, "free_bytes", lambda device: needed_bytes + spare_bytes)
    assert place_for(MODEL, GPU, STEP_BYTES) == place


def test_a_trace_of_a_cpu_is_on_the_host():
    assert place_for(MODEL, CPU, 0) == CPU
