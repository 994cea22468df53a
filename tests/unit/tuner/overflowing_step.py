"""A workload whose gradients overflow in fp16 until the loss scale has been halved a few times."""

import torch
from torch import nn

import kitsune


def make_workload() -> kitsune.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    batch = torch.randn(32, 16), torch.randn(32, 8)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 40.0 * nn.functional.mse_loss(output, target)

    return kitsune.Workload(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-4), batch)
