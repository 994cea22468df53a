"""The drop-in on the CPU: its semantics on the CPU twin of captured graphs, and what no device changes."""

from dataclasses import replace

import pytest
import torch

from kitsune.knobs import Choice
from kitsune.techniques import Facts
from kitsune.techniques.capture import Capture
from tests.optimizer_semantics import *  # noqa: F403


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU on which capture is allowed: its graphs are twins that run their function again."""
    given = Capture.why_not

    def why_not(self: Capture, choice: Choice, facts: Facts) -> str | None:
        return given(self, choice, replace(facts, device="cuda"))

    monkeypatch.setattr(Capture, "why_not", why_not)
    return torch.device("cpu")
