"""Training steps to record: a function of no arguments that runs one, with everything that it needs behind it."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from kitsune.launches.execution.equivalence import EquivalenceCheck
from kitsune.launches.model.recording import Recording
from kitsune.launches.recording.recorder import record

CPU = torch.device("cpu")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Branches(nn.Module):
    """Two branches that could run side by side, batch norm, a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 6, 3, padding=1)
        self.right = nn.Conv2d(3, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm(self.left(x))) + self.right(x).sigmoid()
        hidden = F.relu(hidden + self.deep(hidden), inplace=True)
        return self.head(hidden.mean((2, 3)))


class Tied(nn.Module):
    """A transformer layer that is called twice, dropout, weights of the embedding used again by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(self.embedding(x)))).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(5, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Frozen(nn.Module):
    """A first layer without gradients, a view that is written through, two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps[:1].add_(1)
        hidden = self.second(torch.tanh(self.first(x)))
        padded = torch.zeros(len(x), 8, device=x.device)
        padded[:, :4] = hidden[:, :4]
        padded[:, 4:].copy_(hidden[:, 4:] * 2)
        return self.third(F.dropout(self.second(padded), 0.0))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.01, amsgrad=True, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def rmsprop(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5)


VECTORS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
WORDS = torch.arange(24).reshape(4, 6) % 12
SERIES = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0))

CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, int]] = {
    "mlp": (mlp, VECTORS, 4),
    "branches": (Branches, IMAGES, 4),
    "tied": (Tied, WORDS, 12),
    "recurrent": (Recurrent, SERIES, 4),
    "frozen": (Frozen, VECTORS, 4),
}


@dataclass
class Step:
    """One training: call it for a step. `inputs` are its static batch."""

    model: nn.Module
    optimizer: Optimizer
    inputs: list[torch.Tensor]
    clip: float | None = None

    def __call__(self) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        for parameter in self.model.parameters():
            parameter.grad = None
        x, y = self.inputs
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach(), [parameter.grad for parameter in self.model.parameters()]

    def state(self) -> list[torch.Tensor]:
        """Everything that outlives a step."""
        kept = [self.model.state_dict(), *self.optimizer.state.values()]
        return [value for part in kept for value in part.values() if isinstance(value, torch.Tensor)]


def warmed(
    name: str, make_optimizer: MakeOptimizer = adamw, clip: float | None = None, device: torch.device = CPU
) -> tuple[Step, Step]:
    """The same training twice, after a first step that has made the optimizer's state."""
    make, x, classes = CASES[name]
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = make_optimizer(model.parameters())
    rows = x.numel() if x.dtype == torch.int64 else len(x)
    one = Step(model, optimizer, [x.clone().to(device), (torch.arange(rows) % classes).to(device)], clip)
    one()
    twin = copy.deepcopy(model)
    other = make_optimizer(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return one, Step(twin, other, [tensor.clone() for tensor in one.inputs], clip)


def equal(one: Any, two: Any) -> bool:
    """Two lists of tensors, to the bit."""
    return len(one) == len(two) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, two, strict=True)
    )


def recorded(step: Callable[[], Any]) -> Recording:
    found = record(step, CPU)
    assert found.refusal == ""
    assert found.recording is not None
    return found.recording


def even_us(recording: Recording) -> list[float]:
    """In place of measured times: those of a CPU that others use too may say anything, also that one stream is best."""
    return [10.0] * len(recording.calls)


def names(recording: Recording) -> list[str]:
    """Of its launches."""
    return [launch.name for launch in recording.graph.launches]


def why_refuted(recording: Recording, step: "Step", replay: Callable[[], Any]) -> str | None:
    with EquivalenceCheck(recording, step, step.inputs) as check:
        return check.mismatch(replay)
