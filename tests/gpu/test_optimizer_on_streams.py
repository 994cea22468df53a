"""The drop-in on a GPU with planned launches: the same semantics as on the CPU's twin, on real streams."""

import pytest
import torch

from tests.optimizer_on_streams import *  # noqa: F403
from tests.optimizer_on_streams import MADE, OnStreams
from tests.optimizer_semantics import *  # noqa: F403


@pytest.fixture
def device(monkeypatch, more_streams_win):
    monkeypatch.setattr("kitsune.loop.SegmentedForward", OnStreams)
    MADE.clear()
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture
def knob(more_streams_win):
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
