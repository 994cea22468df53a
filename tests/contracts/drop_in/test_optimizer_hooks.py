"""The drop-in: the optimizer's own hooks, and what close() gives back."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
    adamw,
    assert_same_state,
    batches,
    check,
    criterion,
    fused_adamw,
    pair,
    simple_loop,
    train_both,
)

FUSED = Plan.by_hand(capture="segments", update="fused")
KERNEL = Plan.by_hand(capture="segments", update="kitsune")
both_updates = pytest.mark.parametrize("plan", [FUSED, KERNEL], ids=["fused", "kitsune"])
WARM = 4  # the first forward finds the model, three warm up


@pytest.mark.parametrize("plan", [None, KERNEL], ids=["given", "kitsune"])
@pytest.mark.on_streams
def test_step_hooks_run_exactly_once(device: torch.device, plan: Plan | None) -> None:
    both = pair(device, make_optimizer=adamw if plan else fused_adamw, plan=plan, exact=plan is None)
    seen: list[str] = []
    inner = both.optimizer.base_optimizer
    inner.register_step_pre_hook(lambda *_: seen.append("inner before"))
    inner.register_step_post_hook(lambda *_: seen.append("inner after"))
    both.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    both.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train_both(both, simple_loop, batches(device))
    assert seen == ["before", "inner before", "inner after", "after"] * STEPS


def test_own_step_hooks_do_not_hinder_the_captured_update(device: torch.device) -> None:
    both = pair(device, make_optimizer=fused_adamw)
    seen: list[Any] = []
    both.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(args))
    both.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    train_both(both, simple_loop, batches(device))
    assert seen == [(both.optimizer,), both.optimizer] * STEPS
    assert both.optimizer.counts["update"] > 0


@pytest.mark.parametrize("plan", [None, KERNEL], ids=["given", "kitsune"])
def test_step_hooks_of_all_optimizers_run_exactly_once(device: torch.device, plan: Plan | None) -> None:
    make = adamw if plan else fused_adamw
    both = check(device, simple_loop, make_optimizer=make, plan=plan, exact=plan is None)
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        simple_loop(both.ours, both.optimizer, batches(device))
    finally:
        handle.remove()
    assert seen == [both.optimizer.base_optimizer] * STEPS


def test_state_hooks_are_shared(device: torch.device) -> None:
    both = pair(device)
    seen: list[str] = []
    both.optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    both.optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    both.optimizer.load_state_dict(both.optimizer.state_dict())
    assert seen == ["saved", "loaded"]


def test_wrapping_warns_of_nothing(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = pair(device)
        scheduler = StepLR(both.optimizer, 3)
        for batch in batches(device):
            simple_loop(both.ours, both.optimizer, [batch])
            scheduler.step()
    assert both.captured == STEPS - WARM


@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.on_streams
def test_a_captured_backward_runs_on_the_thread_that_calls_it(device: torch.device, has_threads: bool) -> None:
    """And what the user has set for other backwards is there again after the step."""
    threads: list[int] = []
    settings: list[bool] = []

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        with torch.autograd.set_multithreading_enabled(has_threads):
            for x, y in data:
                optimizer.zero_grad()
                output = model(x)
                output.register_hook(lambda _: threads.append(threading.get_ident()))
                losses.append(criterion(output, y))
                losses[-1].backward()
                optimizer.step()
                settings.append(torch._C._is_multithreading_enabled())
        return losses

    both = check(device, loop)
    assert set(settings) == {has_threads}
    assert threads[-both.captured :] == [threading.get_ident()] * both.captured


@both_updates
@pytest.mark.on_streams
def test_close_gives_everything_back(device: torch.device, plan: Plan) -> None:
    both = check(device, simple_loop, plan=plan, exact=False)
    applied = dict(both.optimizer.report.applied)
    both.optimizer.close()
    assert both.ours._compiled_call_impl is None
    assert both.ours.__dict__.keys() == both.plain.__dict__.keys()
    inner = both.optimizer.base_optimizer
    for mine, theirs in zip(inner.param_groups, both.plain_optimizer.param_groups, strict=True):
        assert {**mine, "params": None} == {**theirs, "params": None}
    assert not inner._optimizer_state_dict_post_hooks
    assert "_init_group" not in inner.__dict__
    assert both.optimizer.report.applied == applied == plan.knobs
    train_both(both, simple_loop, batches(device))
    both.optimizer.close()
    assert_same_state(both)


def test_a_forward_that_fails_once_is_looked_at_again(device: torch.device) -> None:
    """What the last warming forward finds out is not lost with it."""

    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.calls += 1
                if self.calls == WARM:
                    raise ConnectionError("the user's own")
            return super().forward(x) * (1 + 0.1 * self.calls)

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            try:
                loss = criterion(model(x), y)
            except ConnectionError:
                continue
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, make_model=Counting)
    assert both.captured == 0
    assert both.optimizer.report.declined["capture"].startswith("the step sets calls")
