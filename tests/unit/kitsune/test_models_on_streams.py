"""The drop-in with planned launches on models of every kind: optimizer_models.py, on three streams of the twin."""

import pytest
import torch

from tests.optimizer_models import *  # noqa: F403
from tests.optimizer_on_streams import OnStreams
from tests.step_cases import capturing_cpu
from tests.unit.kitsune.launches.steps import even_us


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr("kitsune.runtime.drop_in_loop.SegmentedForward", OnStreams)
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
    return capturing_cpu(monkeypatch)
