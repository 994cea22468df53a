"""Fixtures: what launches cost on a CPU that others use too."""

import pytest

from tests.unit.kitsune.launches.steps import even_us


@pytest.fixture
def even(monkeypatch):
    """Several streams are the quickest by prediction, whatever else this CPU does."""
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
