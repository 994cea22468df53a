"""The drop-in: the loop's own mixed precision."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.plan import Plan
from tests.training_pairs import (
    STEPS,
    Batch,
    adamw,
    assert_same,
    check,
    criterion,
    fused_adamw,
    sgd,
)

KERNEL = Plan.by_hand(capture="segments", update="kitsune")
WARM = 4  # the first forward finds the model, three warm up


def scaler_loop(*, clip: bool, autocast: bool) -> Any:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        kind = data[0][0].device.type
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**15, growth_interval=4)
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=autocast):
                loss = criterion(model(x), y)
            scale = float("inf") if index == 8 else 1.0
            scaler.scale(loss * scale).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.detach(), torch.tensor(scaler.get_scale())]
        return losses

    return loop


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.on_streams
def test_grad_scaler(device: torch.device, make: Any, clip: bool) -> None:
    both = check(device, scaler_loop(clip=clip, autocast=False), make_optimizer=make)
    assert both.captured == STEPS - WARM


@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler_beside_the_kernel(device: torch.device, clip: bool) -> None:
    """It divides the gradients by the scale where the loop has not, and leaves them so."""
    gradients: list[list[torch.Tensor]] = []

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        results = scaler_loop(clip=clip, autocast=False)(model, optimizer, data)
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        return results

    both = check(device, loop, plan=KERNEL, exact=False)
    assert both.captured == STEPS - WARM
    assert both.optimizer.report.applied == KERNEL.knobs
    assert_same(gradients[1], gradients[0], exact=False)


@pytest.mark.parametrize("make", [adamw, fused_adamw, sgd], ids=["adamw", "fused", "sgd"])
def test_autocast_of_the_loop_is_captured(device: torch.device, make: Any) -> None:
    both = check(device, scaler_loop(clip=True, autocast=True), make_optimizer=make)
    assert both.captured == STEPS - WARM


def test_autocast_that_comes_and_goes(device: torch.device) -> None:
    """What was captured with one precision is not replayed with another."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=index % 3 != 2):
                output = model(x)
            assert output.dtype == (torch.float32 if index % 3 == 2 else torch.bfloat16)
            loss = criterion(output.float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, steps=24)
    assert both.captured == 16 - WARM
    assert both.optimizer.counts["other_shape"] == 8


def test_two_shapes_in_flight(device: torch.device) -> None:
    """Graphs of two shapes share no memory: what one throws away may not be where another keeps its gradients."""

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            small = x[:5], y[:5]
            optimizer.zero_grad()
            if index < 16:  # one after the other, until both are captured
                for batch in ((x, y), small):
                    criterion(model(batch[0]), batch[1]).backward()
            else:
                big, little = model(x), model(small[0])
                (criterion(big, y) + criterion(little, small[1])).backward()
            optimizer.step()
            losses.append(criterion(model(x), y).detach())
        return losses

    both = check(device, loop, steps=20, make_optimizer=sgd)
    assert both.optimizer.counts.get("in_flight", 0) == 0
    assert both.captured > 2 * 4


def test_autocast_of_the_loop_stands(device: torch.device) -> None:
    both = check(device, scaler_loop(clip=True, autocast=True), enable_amp=True)
    assert both.captured == 0
    assert any("the loop's own autocast" in note for note in both.optimizer.report.notes)
