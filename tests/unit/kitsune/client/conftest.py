"""Fixtures: how long a script waits for a server, and warnings that were not given yet."""

import pytest

from kitsune.client import plan_lookup
from kitsune.submission.exporting.export import model_fingerprint_of
from tests.unit.kitsune.client.plan_servers import parts

LIMITS_S = {name: getattr(plan_lookup, name) for name in ("CALL_S", "NETWORK_S")}


@pytest.fixture
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(plan_lookup, "_warned", set())


@pytest.fixture
def patience(monkeypatch):
    """A busy machine may take longer for an answer than a training script would wait."""
    for name in LIMITS_S:
        monkeypatch.setattr(plan_lookup, name, 20.0)


@pytest.fixture
def limited(patience, monkeypatch):
    """As long as a training script waits."""
    for name, limit_s in LIMITS_S.items():
        monkeypatch.setattr(plan_lookup, name, limit_s)


@pytest.fixture
def soon_limited(patience, monkeypatch):
    """A quarter of that: what is waited out is the same, only shorter."""
    for name, limit_s in LIMITS_S.items():
        monkeypatch.setattr(plan_lookup, name, limit_s / 4)


@pytest.fixture(scope="module")
def exported_once():
    """The first export of a process loads half of torch."""
    model, optimizer, (x, _) = parts()
    model_fingerprint_of(model, optimizer, x)
