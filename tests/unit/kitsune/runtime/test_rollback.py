"""What is restored of a model before a failed run is repeated."""

import torch
from torch import nn

from kitsune.runtime.rollback import Rollback

CPU = torch.device("cpu")


class Masked(nn.Module):
    """Counts its runs, makes its mask at the first one, and takes a larger one for longer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs = self.runs + 1
        if len(x) > len(self.mask):
            self.mask = torch.ones(len(x))
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((), 2.0))
        return x * self.mask * self.scale


def test_a_run_that_makes_and_grows_buffers_can_be_repeated() -> None:
    model = Masked()
    rollback = Rollback(model, CPU)
    model(torch.ones(3))
    rollback.restore()
    assert model.runs.item() == 0
    assert (len(model.mask), model.scale.item()) == (3, 2.0), "what was made is left as it is"
    assert model(torch.ones(3)).tolist() == [2, 2, 2]
    assert model.runs.item() == 1


def test_a_buffer_that_a_run_removes_is_no_error() -> None:
    model = Masked()
    rollback = Rollback(model, CPU)
    del model.mask
    rollback.restore()


def test_an_update_spoils_the_run() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rollback = Rollback(model, CPU, optimizer)
    assert not rollback.is_spoilt()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert rollback.is_spoilt()
