"""The drop-in: learning rates and hyperparameters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    adamw,
    batches,
    check,
    fused_adamw,
    pair,
    simple_loop,
    train_both,
)

FUSED = Plan.by_hand(capture="segments", update="fused")
KERNEL = Plan.by_hand(capture="segments", update="kitsune")
both_updates = pytest.mark.parametrize("plan", [FUSED, KERNEL], ids=["fused", "kitsune"])
WARM = 4  # the first forward finds the model, three warm up


def schedule(name: str, optimizer: Optimizer) -> Any:
    if name == "step":
        return StepLR(optimizer, step_size=2, gamma=0.5)
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS, cycle_momentum=name == "cycle with momentum")


@pytest.mark.parametrize("name", ["step", "cycle", "cycle with momentum"])
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.on_streams
def test_schedulers(device: torch.device, name: str, built: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        inner = getattr(optimizer, "base_optimizer", optimizer)
        scheduler = schedule(name, inner if built == "before" else optimizer)
        if built == "before" and isinstance(optimizer, KitsuneOptimizer):
            optimizer = KitsuneOptimizer(inner)
            wrappers.append(optimizer)
        losses = []
        for batch in data:
            losses += simple_loop(model, optimizer, [batch])
            scheduler.step()
            losses.append(torch.tensor(scheduler.get_last_lr()))
        return losses

    wrappers: list[KitsuneOptimizer] = []
    both = check(device, loop, make_optimizer=fused_adamw)
    optimizer = wrappers[0] if wrappers else both.optimizer
    assert optimizer.counts["captured"] == STEPS - WARM
    if name == "cycle with momentum":
        assert any("hyperparameter other than the learning rate" in note for note in optimizer.report.notes)
    else:
        assert optimizer.counts["update"] > 0


def test_hyperparameters_changed_by_hand(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, batch in enumerate(data):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)
            if index == 10:
                optimizer.param_groups[0]["weight_decay"] = 0.3
            losses += simple_loop(model, optimizer, [batch])
        return losses

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == STEPS - WARM
    assert both.optimizer.counts["update"] > 0


def test_param_group_added_in_mid_run(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.5})
        return losses + simple_loop(model, optimizer, data)

    def make_optimizer(parameters: Any) -> Optimizer:
        return fused_adamw(list(parameters)[:5])

    both = check(device, loop, make_optimizer=make_optimizer)
    assert both.captured > 0
    assert both.optimizer.counts["update"] > 0


@both_updates
def test_a_param_group_that_is_added_is_the_plans_too(device: torch.device, plan: Plan) -> None:
    both = pair(device, make_optimizer=lambda parameters: adamw(list(parameters)[:5]), plan=plan, exact=False)
    train_both(both, simple_loop, batches(device))
    assert both.optimizer._loop is not None
    for model, optimizer in ((both.plain, both.plain_optimizer), (both.ours, both.optimizer)):
        optimizer.add_param_group({"params": list(model.head.parameters())})
    assert [group["fused"] for group in both.optimizer.param_groups] == [True, True]
    train_both(both, simple_loop, batches(device))
    assert both.optimizer.report.applied == plan.knobs
    both.optimizer.close()
    assert [group["fused"] for group in both.optimizer.param_groups] == [None, None]
