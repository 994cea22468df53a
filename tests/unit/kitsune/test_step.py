"""TrainStep on a CPU: the semantics of tests/step_semantics.py with the CPU twin of captured graphs."""

import pytest
import torch

from kitsune import TrainStep
from kitsune.errors import SettingsError, WorkloadError
from tests.step_cases import capturing_cpu
from tests.step_semantics import *  # noqa: F403


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return capturing_cpu(monkeypatch)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"clip_grad_norm": 0}, SettingsError, "greater than 0"),
        ({"clip_grad_norm": -1.0}, SettingsError, "greater than 0"),
        ({"clip_grad_norm": float("nan")}, SettingsError, "greater than 0"),
        ({"plan": "plan.json"}, SettingsError, "Plan.load"),
        ({"optimizer": "adam"}, WorkloadError, "torch.optim.Optimizer"),
        ({"optimizer": torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])}, WorkloadError, "closure"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)}, WorkloadError, "none of"),
        ({"model": len}, WorkloadError, "torch.nn.Module"),
    ],
)
def test_arguments_that_cannot_be_meant(change, error, text):
    model = torch.nn.Linear(2, 2)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "plan": None, **change}
    with pytest.raises(error, match=text):
        TrainStep(given.pop("model"), None, given.pop("optimizer"), **given)
