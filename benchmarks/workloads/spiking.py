"""A spiking convolutional network over four moments, images of 224 x 224; a batch of 8, and one of 96.

Built after https://github.com/fangwei123456/spikingjelly/pull/740. There, for a spiking transformer, a CUDA graph made
a step 5.1 times as fast at batch 8, and 1.01 times at 96. The network here is our own.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kitsune import Workload

MOMENTS = 4


class Neurons(nn.Sequential):
    """[moments * batch, before, h, w] -> spikes, 0 or 1, [moments * batch, after, h / stride, w / stride]."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        currents = super().forward(x).unflatten(0, (MOMENTS, -1)).unbind()
        potential, spikes = torch.zeros_like(currents[0]), []
        for current in currents:
            potential = potential + (current - potential) / 2
            rate = torch.sigmoid(4 * (potential - 1))  # for the gradient alone
            spikes.append((potential > 1).to(rate.dtype) + (rate - rate.detach()))
            potential = potential * (1 - spikes[-1].detach())
        return torch.cat(spikes)


class SpikingNet(nn.Module):
    """Images [batch, 3, h, w] -> logits [batch, 1000], the mean over the moments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stages = [(Neurons(width << i, width << i), Neurons(width << i, width << (i + 1), 2)) for i in range(3)]
        self.layers = nn.Sequential(Neurons(3, width, 2), *(layer for stage in stages for layer in stage))
        self.head = nn.Linear(width << 3, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = self.layers(x.repeat(MOMENTS, 1, 1, 1)).mean((2, 3)).unflatten(0, (MOMENTS, -1))
        return self.head(rates).mean(0)


def workload_of(batch: int, *, width: int = 64, size: int = 224) -> Workload:
    model = SpikingNet(width).train()
    images = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    return Workload(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3), images)


def make_few() -> Workload:
    return workload_of(8)


def make_many() -> Workload:
    return workload_of(96)
