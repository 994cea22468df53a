"""A UNet that predicts the noise in images of CIFAR's size, 128 of 32 x 32; a time embedding is added in each block.

Built after https://github.com/pytorch/pytorch/issues/190796. There a DDPM UNet of 35.7 M parameters was trained on
CIFAR-10 with torch 2.10, compiled, in bf16: the gradient of a convolution's bias was wrong by up to 1e37 where a
broadcast time embedding is added to its output, and the weights were NaN after 3 or 4 steps. A later version of torch
has mended it. This UNet is a part of that kind: residual blocks on three resolutions, without attention and dropout.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from kitsune import Workload


class Block(nn.Module):
    """Images [batch, before, h, w] and times [batch, 4 * width] -> images [batch, after, h, w]."""

    def __init__(self, before: int, after: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.times = nn.Linear(times, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.times(F.silu(times))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Images [batch, 3, h, w] and moments int64 [batch] -> noise [batch, 3, h, w]; h and w are multiples of 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, times = width, 4 * width
        self.embedding = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.first, wide = nn.Conv2d(3, width, 3, padding=1), 2 * width
        self.down = nn.ModuleList([Block(width, width, times), Block(width, wide, times), Block(wide, wide, times)])
        self.middle = nn.ModuleList([Block(wide, wide, times), Block(wide, wide, times)])
        self.up = nn.ModuleList(
            [Block(2 * wide, wide, times), Block(2 * wide, wide, times), Block(wide + width, width, times)]
        )
        self.last = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        times, h = self.embedding(sinusoids(moments, self.width)), self.first(x)
        kept = []
        for index, block in enumerate(self.down):
            h = block(F.avg_pool2d(h, 2) if index else h, times)
            kept.append(h)
        for block in self.middle:
            h = block(h, times)
        for index, block in enumerate(self.up):
            h = block(torch.cat([F.interpolate(h, scale_factor=2.0) if index else h, kept.pop()], 1), times)
        return self.last(h)


def sinusoids(moments: torch.Tensor, width: int) -> torch.Tensor:
    """int64 [batch] -> fp32 [batch, width]."""
    steps = torch.arange(width // 2, device=moments.device)
    angles = moments[:, None] * torch.exp(steps * (-math.log(10_000) / (width // 2)))
    return torch.cat([angles.sin(), angles.cos()], 1)


def workload_of(batch: int, *, width: int = 128, size: int = 32) -> Workload:
    model = UNet(width).train()
    images, noise = torch.randn(2, batch, 3, size, size)
    x = (images, torch.randint(0, 1000, (batch,)))
    return Workload(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=2e-4), (x, noise))


def make_workload() -> Workload:
    return workload_of(128)
