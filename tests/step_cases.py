"""Small models, batches and the plain training loop that TrainStep is compared with."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.kernels import adamw as adamw_kernel
from kitsune.kernels import launch
from kitsune.knobs import Choice
from kitsune.plan import Plan
from kitsune.step import TrainStep
from kitsune.techniques.capture import Capture
from kitsune.techniques.technique import Facts, Technique
from kitsune.techniques.update import UpdateImplementation
from kitsune.workload import call_model, loss_of, move_batch

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
LR = 2.0**-6


class Mlp(nn.Module):
    """(batch, 8) -> (batch, 4); `dropout` between the layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.first(x))))


class Convnet(nn.Module):
    """(batch, 3, 8, 8) -> (batch, 4), with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.convolution(x))).mean((2, 3)))


class AttentionNet(nn.Module):
    """(batch, length, 4 * width) -> (batch, 4): self-attention of four heads."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.dropout = dropout
        self.heads = nn.Linear(4 * width, 12 * width)
        self.last = nn.Linear(4 * width, 4)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, self.width)).transpose(1, 2) for part in self.heads(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.last(mixed.transpose(1, 2).flatten(2).mean(1))


class OwnSgd(torch.optim.Optimizer):
    """An optimizer that Kitsune has never heard of."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=2.0**-4)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.5)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "adam": lambda params: torch.optim.Adam(params, lr=LR),
    "adamw by hand fused": lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
    "sgd": sgd,
    "sgd by hand fused": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.5, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=LR),
    "unknown": lambda params: OwnSgd(params, lr=LR),
}


def batches(count: int, *shape: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) with x of `shape` and y of (batch, 4), on the CPU, each different."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (6, 8)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape[0], 4, generator=generator)) for _ in range(count)
    ]


@dataclass
class Run:
    """One training: the model, its optimizer, and every loss returned so far, as returned."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Any = F.mse_loss
    clip: float | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)

    def schedule(self, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        self.schedulers.append(make(self.optimizer))

    def do(self, batch: tuple[Any, Any]) -> None:
        raise AssertionError("one of the two kinds of run does it")

    def train(self, many: Sequence[tuple[Any, Any]]) -> None:
        for batch in many:
            self.do(batch)
            for scheduler in self.schedulers:
                scheduler.step()


class Plain(Run):
    """The loop that everybody writes."""

    def do(self, batch: tuple[Any, Any]) -> None:
        x, y = move_batch(batch, next(self.model.parameters()).device)
        self.optimizer.zero_grad()
        loss = loss_of(call_model(self.model, x), self.loss_fn, y)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.losses.append(loss.detach())


class Accumulating(Plain):
    """The loop that adds up the gradients of parts of a batch, each weighed by its rows."""

    parts = 1

    def do(self, batch: tuple[Any, Any]) -> None:
        x, y = move_batch(batch, next(self.model.parameters()).device)
        self.optimizer.zero_grad()
        losses = []
        for some_x, some_y in zip(x.tensor_split(self.parts), y.tensor_split(self.parts), strict=True):
            loss = loss_of(call_model(self.model, some_x), self.loss_fn, some_y) * (len(some_x) / len(x))
            loss.backward()
            losses.append(loss.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.losses.append(torch.stack(losses).sum())


class Planned(Run):
    """The same by TrainStep, as `step`."""

    def start(self, knobs: dict[str, Choice], **options: Any) -> TrainStep:
        plan = Plan.by_hand(**knobs) if knobs else None
        self.step = TrainStep(self.model, self.loss_fn, self.optimizer, plan=plan, clip_grad_norm=self.clip, **options)
        return self.step

    def do(self, batch: tuple[Any, Any]) -> None:
        self.losses.append(self.step(*batch))


def pair(
    device: torch.device,
    knobs: dict[str, Choice],
    *,
    model: Callable[[], nn.Module] = Mlp,
    optimizer: MakeOptimizer = adamw,
    clip: float | None = None,
    loss_fn: Any = F.mse_loss,
    **options: Any,
) -> tuple[Planned, Plain]:
    """The same training twice: by a plan of these knobs, and plain."""
    torch.manual_seed(0)
    one = model().to(device)
    two = copy.deepcopy(one)
    planned = Planned(one, optimizer(one.parameters()), loss_fn, clip)
    plain = Plain(two, optimizer(two.parameters()), loss_fn, clip)
    planned.start(knobs, **options)
    return planned, plain


def capturing_cpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU on which capture and update apply for one test as on a GPU.

    Its graphs are `kitsune.device.cuda_graph.HostGraph`, and the kernel's reference stands in for the kernel: Triton's
    interpreter takes 40 ms for an update, and cannot run in several threads.
    """
    for technique in (Capture, UpdateImplementation):
        apply_as_on_a_gpu(monkeypatch, technique)
    monkeypatch.setattr(launch, "IS_INTERPRETED", True)
    monkeypatch.setattr(adamw_kernel, "update", adamw_kernel.reference)
    return torch.device("cpu")


def apply_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, technique: type[Technique]) -> None:
    why_not = technique.why_not

    def on_a_gpu(self: Technique, choice: Choice, facts: Facts) -> str | None:
        return why_not(self, choice, replace(facts, device="cuda"))

    monkeypatch.setattr(technique, "why_not", on_a_gpu)


def train_both(planned: Run, plain: Run, many: Sequence[tuple[Any, Any]], seed: int = 7) -> None:
    """Both trainings over the same batches, from the same state of the generators."""
    for run in (planned, plain):
        torch.manual_seed(seed)
        run.train(many)


def tolerance_on(device: torch.device) -> dict[str, float]:
    """To the bit on a CPU.

    On a GPU within 1e-4 relative: captured updates compute with the learning rate as an fp32 tensor (2^-24 relative a
    step), and Kitsune's fused and torch's default kernels sum in another order.
    """
    return {"rtol": 0.0, "atol": 0.0} if device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-5}


def assert_same(planned: Run, plain: Run, **tolerance: float) -> None:
    """Losses, parameters, gradients and buffers: as nearly as `tolerance_on` says, unless a tolerance is given."""
    tolerance = tolerance or tolerance_on(next(planned.model.parameters()).device)
    torch.testing.assert_close(torch.stack(planned.losses), torch.stack(plain.losses), **tolerance)
    torch.testing.assert_close(dict(planned.model.state_dict()), dict(plain.model.state_dict()), **tolerance)
    for one, two in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, **tolerance)


def is_captured(step: TrainStep) -> bool:
    """Whether the step, or its forward and backward, come from graphs by now."""
    if step._segments is not None:
        return step.is_settled and step._segments.forward.counts.get("captured", 0) > 0
    return step.is_settled and all(getattr(program, "_graph", None) is not None for program in step._programs)
