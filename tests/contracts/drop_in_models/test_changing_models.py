"""The drop-in: models that change in mid-run."""

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.training_pairs import (
    STEPS,
    Batch,
    check,
    fused_adamw,
    seed,
    sgd,
    simple_loop,
)

WARM = 4  # the first forward finds the model, three warm up


def test_freezing_and_thawing_a_layer(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        model.second.requires_grad_(False)
        losses += simple_loop(model, optimizer, data)
        model.second.requires_grad_(True)
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured == 3 * STEPS - WARM - 3 - 3
    assert both.optimizer.counts["update"] > STEPS


@pytest.mark.on_streams
def test_replacing_a_module(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        seed(3)
        model.head = nn.Linear(16, 3).to(data[0][0].device)
        optimizer.add_param_group({"params": model.head.parameters()})
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=sgd)
    assert both.captured == 2 * STEPS - WARM - 3


def test_replacing_the_tensor_of_a_parameter(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        model.second.weight.data = model.second.weight.data * 0.5
        return losses + simple_loop(model, optimizer, data)

    both = check(device, loop, make_optimizer=fused_adamw)
    assert both.captured > STEPS


def test_a_submodule_put_into_evaluation(device: torch.device) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = simple_loop(model, optimizer, data)
        model.norm.eval()
        return losses + simple_loop(model, optimizer, data)

    assert check(device, loop).captured == 2 * STEPS - WARM - 3
