"""The drop-in: hooks on modules, gradients and outputs."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.contracts.drop_in_models.cases import fp16
from tests.training_pairs import (
    STEPS,
    Batch,
    batches,
    check,
    criterion,
    pair,
    simple_loop,
    train_both,
)

WARM = 4  # the first forward finds the model, three warm up


def install(model: Any, kind: str, seen: list[str]) -> Any:
    def hook(*_: Any) -> None:
        seen.append(kind)

    if kind == "gradient":
        return model.second.weight.register_hook(lambda gradient: hook() or gradient * 0.5)
    if kind == "accumulated":
        return model.second.weight.register_post_accumulate_grad_hook(hook)
    if kind == "of all modules":
        return nn.modules.module.register_module_forward_hook(hook)
    return getattr(model.second, f"register_{kind}_hook")(hook)


KINDS = ["forward_pre", "forward", "full_backward_pre", "full_backward", "gradient", "accumulated"]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_from_the_start(device: torch.device, kind: str) -> None:
    both = pair(device)
    seen: list[str] = []
    install(both.plain, kind, [])
    install(both.ours, kind, seen)
    train_both(both, simple_loop, batches(device))
    assert len(seen) == STEPS
    assert both.captured == 0
    assert "hook" in both.optimizer.report.declined["capture"]


@pytest.mark.parametrize("later", [False, True])
def test_a_hook_on_a_gradient_does_not_run_twice(device: torch.device, later: bool) -> None:
    both = pair(device, enable_amp=True, amp_config=fp16(), capture_graph=False)
    seen: list[str] = []
    if later:
        simple_loop(both.ours, both.optimizer, batches(device))
        both.plain.load_state_dict(both.ours.state_dict())
        both.plain_optimizer.load_state_dict(copy.deepcopy(both.optimizer.state_dict()))
    install(both.plain, "gradient", [])
    install(both.ours, "gradient", seen)
    train_both(both, simple_loop, batches(device))
    assert len(seen) == STEPS
    assert "would run twice" in both.optimizer.report.declined["precision"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.on_streams
def test_hooks_added_in_mid_run(device: torch.device, kind: str) -> None:
    both = check(device, simple_loop)
    seen: list[str] = []
    install(both.plain, kind, [])
    install(both.ours, kind, seen)
    train_both(both, simple_loop, batches(device))
    assert len(seen) == STEPS
    assert "hook" in both.optimizer.report.declined["capture"]


def test_hooks_of_all_modules(device: torch.device) -> None:
    both = check(device, simple_loop)
    seen: list[str] = []
    handle = install(both.ours, "of all modules", seen)
    try:
        simple_loop(both.ours, both.optimizer, batches(device))
    finally:
        handle.remove()
    assert len(seen) >= STEPS * 5
    assert any("hook on all modules" in note for note in both.optimizer.report.notes)
    before = both.captured
    simple_loop(both.ours, both.optimizer, batches(device, 2))
    assert both.captured == before + 2


def test_hooks_on_outputs(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)
            output.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
            criterion(output, y).backward()
            optimizer.step()
        return seen

    assert check(device, loop).captured == STEPS - WARM
