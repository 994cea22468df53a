"""One Linear of ten inputs and one output, on a single row: one of several parts of a step.

Built after https://github.com/pytorch/pytorch/issues/169545. There mode="reduce-overhead" raised at the second backward
of a loop that adds up gradients, on an H100 too; https://github.com/pytorch/pytorch/issues/181723 tells of wrong
gradients without an error by torch.cuda.make_graphed_callables. The loop is in benchmarks/situations.py.
"""

import torch
from torch import nn

from kitsune import Workload


def sum_of(output: torch.Tensor, _: None) -> torch.Tensor:
    return output.sum()


def make_workload() -> Workload:
    """x: fp32 [10]."""
    model = nn.Linear(10, 1).train()
    return Workload(model, sum_of, torch.optim.SGD(model.parameters(), lr=0.01), (torch.randn(10), None))
