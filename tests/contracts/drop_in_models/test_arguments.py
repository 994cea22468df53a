"""The drop-in: outputs and inputs of every form."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from tests.contracts.drop_in_models.cases import Hidden, Returns, fp16, loop_over
from tests.training_pairs import (
    STEPS,
    Batch,
    Net,
    batches,
    check,
    criterion,
    pair,
    sgd,
    train_both,
)

WARM = 4  # the first forward finds the model, three warm up


class Output(OrderedDict[str, Any]):
    """An output with attributes, as Hugging Face's models return it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda out: (out, None, 3), lambda out: out[0]),
        (lambda out: {"logits": out, "detached": out.detach()}, lambda out: out["logits"]),
        (lambda out: Output(loss=out.mean(), logits=out), lambda out: out.logits),
        (lambda out: [out, (out * 2, [out.argmax(1)])], lambda out: out[0] + out[1][0]),
        (lambda out: (out, out), lambda out: out[0] + out[1]),
    ],
    ids=["tuple", "dict", "attributes", "nested", "twice the same"],
)
@pytest.mark.on_streams
def test_outputs_of_many_forms(device: torch.device, wrap: Any, unwrap: Any) -> None:
    both = check(device, loop_over(unwrap), make_model=lambda: Returns(wrap))
    assert both.captured == STEPS - WARM
    x, _ = batches(device, 1)[0]
    assert type(both.ours(x)) is type(both.plain(x))


def test_outputs_that_hide_their_tensors(device: torch.device) -> None:
    both = check(device, loop_over(lambda out: out.logits), make_model=lambda: Returns(Hidden))
    assert both.captured == 0
    assert "Hidden" in both.optimizer.report.declined["capture"]


def test_hidden_outputs_are_not_scaled(device: torch.device) -> None:
    both = pair(device, lambda: Returns(Hidden), enable_amp=True, amp_config=fp16(), capture_graph=False)
    train_both(both, loop_over(lambda out: out.logits), batches(device))
    assert "Hidden" in both.optimizer.report.declined["precision"]


@dataclass(eq=False)
class Graph:
    x: torch.Tensor


class TakesGraph(Net):
    def forward(self, graph: Graph) -> torch.Tensor:  # type: ignore[override]
        return super().forward(graph.x)


@dataclass
class Unhashable(Graph):
    pass


@pytest.mark.parametrize("kind", [Graph, Unhashable])
def test_arguments_that_hide_their_tensors(device: torch.device, kind: Any) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        same, losses = kind(data[0][0]), []
        for x, y in data:
            same.x = x
            optimizer.zero_grad()
            loss = criterion(model(same), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = check(device, loop, make_model=TakesGraph)
    assert both.captured == 0
    if kind is Graph:
        assert "Graph" in both.optimizer.report.declined["capture"]


def test_keyword_and_dict_arguments(device: torch.device) -> None:
    class Keywords(Net):
        def forward(self, *, batch: dict[str, torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            return super().forward(batch["x"] if mask is None else batch["x"] * mask)

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(batch={"x": x}, mask=x > 0), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    assert check(device, loop, make_model=Keywords).captured == STEPS - WARM


@pytest.mark.parametrize("options", [{}, {"enable_amp": True}], ids=["capture", "scaled"])
def test_inputs_that_require_gradients(device: torch.device, options: dict[str, Any]) -> None:
    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        gradients = []
        for x, y in data:
            optimizer.zero_grad()
            given = x.clone().requires_grad_()
            criterion(model(given * 2), y).backward()
            optimizer.step()
            assert given.grad is not None
            gradients.append(given.grad)
        return gradients

    if options:
        options = {**options, "amp_config": fp16(), "exact": False}
    both = pair(device, make_optimizer=sgd, **options)
    if options:
        for x, y in batches(device):
            loop(both.ours, both.optimizer, [(x, y)])
    else:
        train_both(both, loop, batches(device))
    assert both.captured == 0
    assert any("whose inputs require gradients" in note for note in both.optimizer.report.notes)


def test_lengths_stay_on_the_host(device: torch.device) -> None:
    """torch wants the lengths of packed sequences on the CPU; a drop-in moves nothing."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, hidden = self.cell(packed)
            return self.head(hidden[-1])

    def loop(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> list[torch.Tensor]:
        losses = []
        for index, (x, y) in enumerate(data):
            optimizer.zero_grad()
            lengths = (torch.arange(8) + index) % 4 + 1
            loss = criterion(model(x.unsqueeze(1).repeat(1, 4, 1), lengths), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both = pair(device, Recurrent, capture_graph=device.type == "cuda", enable_amp=False)
    train_both(both, loop, batches(device))
    assert both.captured == 0
