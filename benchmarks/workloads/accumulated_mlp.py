"""An MLP of three layers whose loss is the mean of its outputs: one of the four parts of a step.

Built after https://github.com/pytorch/pytorch/issues/96693. There, on torch 2.1, gradients of four backwards were to be
added up with Inductor's CUDA graph trees: the gradient of the last bias came to 0.25 in place of 1.0, without an error.
The loop is in benchmarks/situations.py. Widths and batch are our choice.
"""

import torch
from torch import nn

from kitsune import Workload


def mean_of(output: torch.Tensor, _: None) -> torch.Tensor:
    """Its gradient for the last bias is 1."""
    return output.mean()


def make_workload() -> Workload:
    """x: fp32 [32, 64]; the model's output is [32, 1]."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).train()
    return Workload(model, mean_of, torch.optim.SGD(model.parameters(), lr=0.01), (torch.randn(32, 64), None))
