"""TrainStep on a GPU with planned launches: what the CPU's twin shows, on real streams and in a real graph."""

import pytest
import torch

from tests.step_cases import OPTIMIZERS, assert_same, batches, is_captured, pair, train_both
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_optimizers_are_planned(device, name):
    planned, plain = pair(device, {"capture": "step"}, optimizer=OPTIMIZERS[name])
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert is_captured(planned.step)
    (graph,) = MADE
    assert graph.streams_refusal == ""
