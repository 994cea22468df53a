"""A model whose branches can run beside each other, and a loop that trains it."""

import torch
from torch import nn

from tests.step_cases import batches


class Towers(nn.Module):
    """Two branches beside each other; `asks`: it reads a number of its own on the host in every forward."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(()))
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(self.scale) if self.asks else 1.0
        return self.last(torch.tanh(self.left(x)) * torch.relu(self.right(x)) * scale)


class Stats:
    """A running mean of the user's own, which no module knows of."""

    def __init__(self, device: torch.device) -> None:
        self.means = [{"hidden": torch.zeros(16, device=device)}]

    def see(self, hidden: torch.Tensor) -> None:
        self.means[0]["hidden"].mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    for x, y in batches(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def towers(device: torch.device, **options) -> Towers:
    torch.manual_seed(0)
    return Towers(**options).to(device)
