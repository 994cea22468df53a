"""TrainStep on a GPU with planned launches: what the CPU's twin shows, on real streams and in a real graph."""

import pytest
import torch

from tests.unit.kitsune.test_step_on_streams import *  # noqa: F403
from tests.unit.kitsune.test_step_on_streams import MADE, OnStreams


@pytest.fixture
def device(monkeypatch, more_streams_win):
    """The first GPU, where every captured step is planned for four streams."""
    monkeypatch.setattr("kitsune.step.StepGraph", OnStreams)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    MADE.clear()
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
