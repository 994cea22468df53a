"""The drop-in: checkpoints and copies."""

import copy
import io
import pickle
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
    Pair,
    adamw,
    assert_same,
    batches,
    check,
    fused_adamw,
    pair,
    seed,
    sgd,
    simple_loop,
    train_both,
)

FUSED = Plan.by_hand(capture="segments", update="fused")
KERNEL = Plan.by_hand(capture="segments", update="kitsune")
both_updates = pytest.mark.parametrize("plan", [FUSED, KERNEL], ids=["fused", "kitsune"])
WARM = 4  # the first forward finds the model, three warm up


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
def test_checkpoints_load_with_and_without_kitsune(device: torch.device, make: Any) -> None:
    both = check(device, simple_loop, make_optimizer=make)
    files = [io.BytesIO(), io.BytesIO()]
    torch.save((both.plain.state_dict(), both.plain_optimizer.state_dict()), files[0])
    torch.save((both.ours.state_dict(), both.optimizer.state_dict()), files[1])
    seed(5)
    crossed = Pair(Net().to(device), None, Net().to(device), None)  # type: ignore[arg-type]
    crossed.plain_optimizer = make(crossed.plain.parameters())
    crossed.optimizer = KitsuneOptimizer(make(crossed.ours.parameters()))
    for model, optimizer, file in (
        (crossed.ours, crossed.optimizer, files[0]),
        (crossed.plain, crossed.plain_optimizer, files[1]),
    ):
        file.seek(0)
        model_state, optimizer_state = torch.load(file, weights_only=True)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    train_both(crossed, simple_loop, batches(device))
    assert crossed.captured == STEPS - WARM


@pytest.mark.on_streams
def test_checkpoint_loaded_in_mid_run(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data[:9])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses += simple_loop(model, optimizer, data)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == 9 + 2 * STEPS - WARM
    assert both.optimizer.counts["update"] > STEPS + 5


def test_empty_checkpoint_loaded_in_mid_run(device: torch.device) -> None:
    """State that is made anew must not be made under capture, where each replay would make it again."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        fresh = copy.deepcopy(optimizer.state_dict())
        losses = simple_loop(model, optimizer, data)
        optimizer.load_state_dict(fresh)
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.optimizer.counts["update"] > STEPS


def test_state_cleared_in_mid_run(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        optimizer.state.clear()
        return losses + simple_loop(model, optimizer, data)

    assert check(device, loop, make_optimizer=fused_adamw).optimizer.counts["update"] > STEPS


@both_updates
def test_checkpoint_keys_are_plain_at_all_times(device: torch.device, plan: Plan) -> None:
    both = pair(device, plan=plan, exact=False)
    for batch in batches(device):
        train_both(both, simple_loop, [batch])  # compares the checkpoints, keys and flags included
        assert_same(both.optimizer.state_dict()["param_groups"], both.plain_optimizer.state_dict()["param_groups"])
    assert both.captured > 0
    assert both.optimizer.report.applied == plan.knobs


def test_copies_of_the_model_are_plain(device: torch.device) -> None:
    both = check(device, simple_loop)
    average = copy.deepcopy(both.ours)
    thawed = pickle.loads(pickle.dumps(both.ours))
    x, _ = batches(device, 1)[0]
    for model in (average, thawed):
        assert model._compiled_call_impl is None
        assert type(model) is Net
        before = both.captured
        assert torch.isfinite(model(x)).all()
        assert both.captured == before
    averaged = torch.optim.swa_utils.AveragedModel(both.ours)
    averaged.update_parameters(both.ours)
    assert_same(dict(averaged.module.state_dict()), dict(both.ours.state_dict()))


def test_model_keeps_its_looks(device: torch.device) -> None:
    both = check(device, simple_loop)
    assert type(both.ours) is Net
    assert repr(both.ours) == repr(both.plain)
    assert [name for name, _ in both.ours.named_modules()] == [name for name, _ in both.plain.named_modules()]
    assert list(both.ours.state_dict()) == list(both.plain.state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in both.ours.modules())


@both_updates
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_model_and_optimizer_train_on(device: torch.device, duplicate: Any, plan: Plan) -> None:
    both = check(device, simple_loop, plan=plan, exact=False)
    model, optimizer = duplicate((both.ours, both.optimizer))
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert optimizer.param_groups[0]["fused"] is None
    copied = Pair(both.plain, both.plain_optimizer, model, optimizer, exact=False)
    train_both(copied, simple_loop, batches(device))
    assert copied.captured == STEPS - WARM


def test_prepared_as_accelerate_does(device: torch.device) -> None:
    """State loaded from itself, and `step` swapped on the instance."""
    both = pair(device)
    both.optimizer.load_state_dict(both.optimizer.state_dict())
    given, called = both.optimizer.step, []

    def patched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return given(*args, **kwargs)

    both.optimizer.step = types.MethodType(patched, both.optimizer)  # type: ignore[method-assign]
    train_both(both, simple_loop, batches(device))
    assert len(called) == STEPS
    assert both.captured == STEPS - WARM
