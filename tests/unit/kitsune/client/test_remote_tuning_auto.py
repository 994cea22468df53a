"""`plan="auto"`: a step and the drop-in ask for their own plan and train by it, or train plain."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kitsune
from kitsune.submission.exporting.export import fingerprint_of, model_fingerprint_of
from kitsune.workload import Workload
from tests.scripted_server import absent
from tests.unit.kitsune.client.plan_servers import LIMIT_S, parts, plan_for, serves

pytestmark = pytest.mark.usefixtures("fresh_warnings", "patience", "exported_once")


def losses(step, batch, steps: int = 4) -> list[float]:
    return [float(step(*batch)) for _ in range(steps)]


def test_a_step_asks_for_its_own_plan_and_trains_by_it(monkeypatch):
    model, optimizer, batch = parts()
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        with kitsune.TrainStep(model, F.cross_entropy, optimizer, plan="auto") as step:
            assert server.seen == []
            seen = losses(step, batch)
            assert step.report.applied == {"update": "fused"}
            assert step.plan.knobs == {"update": "fused"}
    assert [request.path for request in server.seen] == ["/healthz", "/api/v1/plans", "/api/v1/plans"]
    model, optimizer, batch = parts()
    asked = fingerprint_of(Workload(model, F.cross_entropy, optimizer, batch))
    assert f"fingerprint={asked}&" in server.seen[2].query + "&"
    assert seen == pytest.approx(losses(kitsune.TrainStep(model, F.cross_entropy, optimizer), batch), rel=1e-4)


def test_a_step_without_a_server_trains_plain(monkeypatch):
    monkeypatch.setenv("KITSUNE_SERVER", absent())
    model, optimizer, batch = parts()
    step = kitsune.TrainStep(model, F.cross_entropy, optimizer, plan="auto")
    began = time.monotonic()
    first = float(step(*batch))
    assert time.monotonic() - began < LIMIT_S
    assert step.report.applied == {}
    assert "plan='auto': UnreachableError" in str(step.report)
    model, optimizer, batch = parts()
    assert first == float(kitsune.TrainStep(model, F.cross_entropy, optimizer)(*batch))


def test_a_step_that_is_switched_off_asks_nobody(monkeypatch):
    monkeypatch.setenv("KITSUNE_DISABLE", "1")
    with serves(plan_for()).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        model, optimizer, batch = parts()
        kitsune.TrainStep(model, F.cross_entropy, optimizer, plan="auto")(*batch)
    assert server.seen == []


def train(optimizer, model, batch, steps: int = 4) -> list[float]:
    x, y = batch
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_the_drop_in_asks_by_its_model_and_trains_by_the_plan(monkeypatch):
    model, optimizer, batch = parts()
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
        seen = train(wrapped, model, batch)
        assert wrapped.report.applied == {"update": "fused"}
        wrapped.close()
    assert [request.path for request in server.seen] == ["/healthz", "/api/v1/plans", "/api/v1/plans"]
    plain, optimizer, batch = parts()
    assert f"fingerprint={model_fingerprint_of(plain, optimizer, batch[0])}&" in server.seen[2].query + "&"
    assert seen == pytest.approx(train(optimizer, plain, batch), rel=1e-4)


def test_the_drop_in_without_a_server_trains_plain_with_what_was_chosen_by_hand(monkeypatch):
    monkeypatch.setenv("KITSUNE_SERVER", absent())
    model, optimizer, batch = parts()
    wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
    seen = train(wrapped, model, batch)
    assert wrapped.report.applied == {}
    assert "plan='auto': UnreachableError" in str(wrapped.report)
    plain, optimizer, batch = parts()
    assert seen == train(optimizer, plain, batch)
    model, optimizer, batch = parts()
    by_hand = kitsune.KitsuneOptimizer(optimizer, plan="auto", enable_amp=True)
    train(by_hand, model, batch)
    assert by_hand.report.applied == {"precision": "bf16"}


def test_the_drop_in_waits_for_a_forward_of_training(monkeypatch):
    model, optimizer, batch = parts()
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
        train(wrapped, model, batch, steps=1)
        with torch.no_grad():
            model(batch[0])
        model.eval()
        model(batch[0])
        assert server.seen == []
        model.train()
        train(wrapped, model, batch, steps=1)
        assert len(server.seen) == 3
        train(wrapped, model, batch, steps=2)
        assert len(server.seen) == 3


def test_the_drop_in_names_what_is_called_by_name(monkeypatch):
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x, *, scale):
            return self.inner(x) * scale

    torch.manual_seed(0)
    model = ByName()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = {"x": torch.randn(4, 8), "scale": torch.ones(1)}
    with serves(plan_for({"update": "fused"})).running() as server:
        monkeypatch.setenv("KITSUNE_SERVER", server.url)
        wrapped = kitsune.KitsuneOptimizer(optimizer, plan="auto")
        for _ in range(2):
            model(x["x"], scale=x["scale"]).sum().backward()
            wrapped.step()
        wrapped.close()
    assert f"fingerprint={model_fingerprint_of(model, optimizer, x)}&" in server.seen[2].query + "&"
