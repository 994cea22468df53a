"""KITSUNE_DISABLE, alone and under a plan."""

import pytest
import torch

from kitsune.base.environment import is_disabled
from kitsune.errors import SettingsError
from kitsune.plan import Plan
from kitsune.step import TrainStep
from tests.step_cases import assert_same, batches, pair, train_both


@pytest.mark.parametrize(
    ("value", "disabled"),
    [("1", True), ("TRUE", True), (" yes ", True), ("on", True), ("0", False), ("", False), ("off", False)],
)
def test_values(monkeypatch, value, disabled):
    monkeypatch.setenv("KITSUNE_DISABLE", value)
    assert is_disabled() is disabled


def test_unset():
    assert is_disabled() is False


def test_a_value_without_sense(monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "maybe")
    with pytest.raises(SettingsError, match="KITSUNE_DISABLE is 'maybe'; use 1 or 0"):
        pair(torch.device("cpu"), {"update": "fused"})


@pytest.mark.parametrize("on_decline", ["eager", "raise"])
def test_the_step_runs_as_given(monkeypatch, on_decline):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    planned, plain = pair(torch.device("cpu"), {"update": "fused", "precision": "bf16"}, on_decline=on_decline)
    train_both(planned, plain, batches(3))
    assert_same(planned, plain)
    assert planned.step.report.applied == {}
    assert set(planned.step.report.declined.values()) == {"KITSUNE_DISABLE is set"}
    assert set(planned.step.report.declined) == {"update", "precision"}


def test_a_policy_without_sense():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(SettingsError, match="on_decline is 'maybe'"):
        TrainStep(model, None, torch.optim.SGD(model.parameters()), Plan(), on_decline="maybe")  # type: ignore[arg-type]
