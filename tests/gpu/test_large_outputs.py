"""Large logits of the drop-in on a GPU: memory, losses that the user has compiled, and functions of the user's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune import KitsuneOptimizer, Plan
from kitsune.autograd import half_outputs
from kitsune.capture import segment_graphs

CLASSES, ROWS, STEPS = 16384, 2048, 8
PLAN = Plan.by_hand(capture="segments", precision="bf16", compile="default", update="kitsune")
LOGITS_BYTES = 4 * CLASSES * ROWS
LEAST_BYTES = half_outputs.LEAST_BYTES


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def plain_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y)


def compiled_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.compile(plain_loss)(logits, y)


def doubled_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(Doubled.apply(logits), y)


def loss_after_a_metric(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        assert (logits.argmax(-1) == y).float().mean().isfinite()
    return F.cross_entropy(logits, y) + 1e-3 * logits.logsumexp(-1).square().mean()


def smoothed_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)(logits, y)


def trained(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    loss_fn: Callable[..., torch.Tensor],
    least_bytes: int,
    plan: Plan = PLAN,
) -> tuple[list[float], int]:
    """(losses, peak bytes of the last steps)."""
    monkeypatch.setattr(half_outputs, "LEAST_BYTES", least_bytes)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, CLASSES)).to(device)
    optimizer = KitsuneOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan)
    x, y = (torch.randint(64, (ROWS,), device=device) for _ in range(2))
    losses = []
    for step in range(STEPS):
        if step == STEPS - 2:
            torch.cuda.reset_peak_memory_stats(device)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.report.declined == {}
    assert optimizer.report.applied == plan.knobs
    assert optimizer.counts["captured"] > 0
    optimizer.close()
    return losses, torch.cuda.max_memory_allocated(device)


@pytest.mark.parametrize("loss_fn", [plain_loss, smoothed_loss, loss_after_a_metric, compiled_loss, doubled_loss])
def test_losses_are_those_of_logits_in_fp32(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, loss_fn: Callable[..., torch.Tensor]
) -> None:
    ours, _ = trained(device, monkeypatch, loss_fn, LEAST_BYTES)
    plain, _ = trained(device, monkeypatch, loss_fn, 2**60)
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("loss_fn", [plain_loss, loss_after_a_metric])
def test_rows_that_begin_at_odd_addresses_are_padded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, loss_fn: Callable[..., torch.Tensor]
) -> None:
    found, lies_in = [], segment_graphs.lies_in

    def noted(gradient: torch.Tensor, static: torch.Tensor) -> bool:
        found.append((lies_in(gradient, static), static.stride()))
        return found[-1][0]

    monkeypatch.setattr(f"{__name__}.CLASSES", 16381)
    plain, _ = trained(device, monkeypatch, loss_fn, 2**60)
    monkeypatch.setattr(segment_graphs, "lies_in", noted)
    ours, _ = trained(device, monkeypatch, loss_fn, LEAST_BYTES)
    assert found[-1] == (loss_fn is plain_loss, (16384, 1))
    assert ours == pytest.approx(plain, rel=1e-2)


def test_on_several_streams(device: torch.device, monkeypatch: pytest.MonkeyPatch, more_streams_win: None) -> None:
    plan = Plan.by_hand(**{**PLAN.knobs, "streams": 3})
    ours, _ = trained(device, monkeypatch, loss_after_a_metric, half_outputs.LEAST_BYTES, plan)
    plain, _ = trained(device, monkeypatch, loss_after_a_metric, 2**60)
    assert ours == pytest.approx(plain, rel=1e-2)


def test_several_copies_of_the_logits_are_saved(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = trained(device, monkeypatch, plain_loss, half_outputs.LEAST_BYTES)
    _, plain = trained(device, monkeypatch, plain_loss, 2**60)
    assert plain - ours > 2 * LOGITS_BYTES
