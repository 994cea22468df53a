"""TrainStep on a CPU: the semantics of tests/step_semantics.py with the CPU twin of captured graphs."""

from dataclasses import replace

import pytest
import torch

from kitsune.techniques.capture import Capture
from tests.step_semantics import *  # noqa: F403

WHY_NOT = Capture.why_not


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU on which capture applies: its graphs are `kitsune.device.HostGraph`."""
    monkeypatch.setattr(
        Capture, "why_not", lambda self, choice, facts: WHY_NOT(self, choice, replace(facts, device="cuda"))
    )
    return torch.device("cpu")
