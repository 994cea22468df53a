"""Models, loops and configurations that several files of this folder use."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.amp import AMPConfig
from tests.training_pairs import Batch, Net, criterion


@dataclass
class Hidden:
    """An output that no pytree looks into."""

    logits: torch.Tensor


class Returns(Net):
    """A model that returns its logits in some wrapping."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


def loop_over(unwrap: Any) -> Any:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(unwrap(model(x)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return loop


def fp16(**arguments: Any) -> Any:
    return AMPConfig(dtype=torch.float16, **arguments)
