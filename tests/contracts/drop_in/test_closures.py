"""The drop-in: closures."""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    adamw,
    check,
    criterion,
    fused_adamw,
)

KERNEL = Plan.by_hand(capture="segments", update="kitsune")
WARM = 4  # the first forward finds the model, three warm up


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("plan", [None, KERNEL], ids=["given", "kitsune"])
@pytest.mark.on_streams
def test_closure_that_holds_the_whole_step(device: torch.device, by_keyword: bool, plan: Plan | None) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            losses.append(loss.detach())  # type: ignore[union-attr]
        return losses

    both = check(device, loop, make_optimizer=adamw if plan else fused_adamw, plan=plan, exact=plan is None)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0


def test_lbfgs_stays_plain(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data[:4]:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())  # type: ignore[union-attr,call-overload]
        return losses

    both = check(device, loop, make_optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))
    assert both.captured == 0
    assert "LBFGS" in both.optimizer.report.declined["capture"]
