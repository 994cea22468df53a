"""Two trainings from one start: a loop with the optimizer as given, and the same loop with KitsuneOptimizer."""

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kitsune.optimizer import KitsuneOptimizer

Batch = tuple[torch.Tensor, torch.Tensor]
Loop = Callable[[nn.Module, Optimizer, list[Batch]], list[torch.Tensor]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

STEPS = 12
criterion = nn.CrossEntropyLoss()


class Net(nn.Module):
    """An MLP with batch norm: buffers, and layers that tests freeze and replace."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16, bias=False)  # a bias before a norm has nothing but noise for a gradient
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(hidden)))


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    random.seed(value)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(device: torch.device, count: int = STEPS, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(count):
        x, y = torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)
        made.append((x.to(device), y.to(device)))
    return made


@dataclass
class Pair:
    plain: nn.Module
    plain_optimizer: Optimizer
    ours: nn.Module
    optimizer: KitsuneOptimizer
    exact: bool = True  # False when the plan computes the update in another order

    @property
    def captured(self) -> int:
        return self.optimizer.counts.get("captured", 0)


def pair(
    device: torch.device,
    make_model: Callable[[], nn.Module] = Net,
    make_optimizer: MakeOptimizer = adamw,
    exact: bool = True,
    **options: Any,
) -> Pair:
    seed()
    plain = make_model()
    ours = copy.deepcopy(plain).to(device)
    plain.to(device)
    optimizer = KitsuneOptimizer(make_optimizer(ours.parameters()), **options)
    return Pair(plain, make_optimizer(plain.parameters()), ours, optimizer, exact)


def train_both(both: Pair, loop: Loop, data: list[Batch]) -> Pair:
    """Runs the loop on both sides, from the same seed, and asserts that losses, models and checkpoints are the same."""
    seed(1)
    expected = loop(both.plain, both.plain_optimizer, data)
    seed(1)
    losses = loop(both.ours, both.optimizer, data)
    assert len(losses) == len(expected) > 0
    for mine, theirs in zip(losses, expected, strict=True):
        assert_same(mine, theirs, both.exact)
    assert_same_state(both)
    return both


def check(device: torch.device, loop: Loop, *, size: int = 8, steps: int = STEPS, **kinds: Any) -> Pair:
    """`pair` and `train_both` in one."""
    return train_both(pair(device, **kinds), loop, batches(device, steps, size))


def assert_same_state(both: Pair) -> None:
    assert_same(both.ours.state_dict(), both.plain.state_dict(), both.exact)
    ours = {name: value for name, value in both.optimizer.state_dict().items() if name != "loss_scaling"}
    assert_same(ours, both.plain_optimizer.state_dict(), both.exact)


def assert_same(mine: Any, theirs: Any, exact: bool = True) -> None:
    """Equal to the bit on a CPU; on a GPU within what another order of rounding may do in a dozen steps."""
    if isinstance(theirs, torch.Tensor):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.device == theirs.device
        if theirs.is_cuda or not exact:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(mine, theirs)
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        for key, value in theirs.items():
            assert_same(mine[key], value, exact)
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other, exact)
    else:
        assert mine == theirs


def simple_loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
