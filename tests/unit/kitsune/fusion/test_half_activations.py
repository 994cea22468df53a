"""Activations that autocast leaves in fp32 are rounded where other layers read them, and nowhere else."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kitsune.fusion.half_activations import Rounding, round_activations
from kitsune.fusion.operations import operation_of, value_of

WIDTH, CLASSES = 16, 32
IDS = torch.arange(12).view(3, 4)
LOWEST = torch.finfo(torch.float32).min


class Model(nn.Module):
    """`after` gets the model and the embedded ids, and gives what it returns."""

    def __init__(self, after: Callable[["Model", torch.Tensor], Any]) -> None:
        super().__init__()
        self.after = after
        self.embedding, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.randn(4, WIDTH))
        self.register_buffer("waves", torch.randn(8, WIDTH))
        self.register_buffer("places", 1000 + torch.arange(WIDTH) / 8)
        self.register_buffer("hidden", torch.tensor([[False] * 4, [True] * 4] * 2))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.after(self, self.embedding(ids))


@dataclass
class Seen:
    """What was rounded in a graph, and the dtypes of its results after that, by operation."""

    names: list[str] = field(default_factory=list)
    dtypes: list[tuple[str, torch.dtype]] = field(default_factory=list)


def run(after: Callable[[Model, torch.Tensor], Any], enabled: bool = True) -> tuple[Any, Any, Seen]:
    """(the result as given, with rounding, what was rounded)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, seen = Model(after), Seen()

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        before = set(graph.graph.nodes)
        count = round_activations(graph, torch.bfloat16)
        casts = [node for node in graph.graph.nodes if node not in before and value_of(node).dtype == torch.bfloat16]
        assert count == len(casts)
        seen.names = [operation_of(node.args[0]).name or node.args[0].target.__name__ for node in casts]
        tensors = [node for node in graph.graph.nodes if isinstance(value_of(node), torch.Tensor)]
        seen.dtypes = [(operation_of(node).name, value_of(node).dtype) for node in tensors if node.op != "placeholder"]
        graph.graph.lint()
        return graph

    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return model(IDS), torch.compile(model, backend=backend)(IDS), seen


def residual(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.head(x + model.layer(x))


def with_positions(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.head(model.layer(x) + model.positions)


def with_a_buffer(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.head(model.layer(x) + model.waves[: x.shape[1]].unsqueeze(0))


def returned(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + model.layer(x)
    return y, x, model.head(y)


def masked(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Scores with a mask that hides whole rows: minus infinity everywhere would give NaN."""
    mask = torch.where(model.hidden, LOWEST, 0.0)
    return torch.softmax(model.layer(x) @ x.transpose(1, 2) + mask, -1) @ model.layer(x)


def cast_by_the_model(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x).float()
    return model.head(y * model.positions)


def with_a_penalty(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x).mean() + model.positions.square().sum()


def filled(model: Model, x: torch.Tensor) -> torch.Tensor:
    """bf16 does not have the lowest number of fp32."""
    hidden = x.masked_fill(model.hidden[:3].unsqueeze(-1), LOWEST)
    return model.head(hidden.clamp(min=-1.0) + model.layer(x))


def without_autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        x = F.layer_norm(x, (WIDTH,)) + F.embedding(IDS, model.embedding.weight)
    return model.head(x)


def written_in_place(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x[:, 0] = 7.0
    return x, model.layer(x)


def written_by_a_view(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model.head(x)
    x.view(-1, WIDTH)[2].zero_()
    return y + model.layer(x)


def returned_twice(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + model.layer(x)
    return y, y.view(-1, WIDTH)


def counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    """bf16 has no 257."""
    return model.layer(x), x.new_ones(300, 2).sum(0), torch.ones_like(x)[0, :, 0], torch.arange(300).type_as(x)


def masked_by_the_batch(model: Model, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.where(model.hidden[:3, :1], LOWEST, 0.0).unsqueeze(-1)
    return model.layer(x), (model.layer(x) + hidden)[1]


def with_large_numbers(model: Model, x: torch.Tensor) -> torch.Tensor:
    return (model.layer(x) + model.places)[0], model.head(x)


def outside_of_autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        scores = x @ x.transpose(1, 2)
    return scores, model.layer(x)


def added_to_a_sum_in_fp32(model: Model, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3, 4, WIDTH)
    total += x
    return total, model.layer(x)


def as_other_bits(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32), model.layer(x)


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (residual, ["embedding"]),
        (with_positions, ["embedding", "add"]),
        (with_a_buffer, ["embedding"]),
        (returned, ["embedding"]),
        (masked, ["embedding"]),
        (cast_by_the_model, ["embedding"]),
        (with_a_penalty, ["embedding"]),
        (filled, ["embedding"]),
        (written_in_place, []),
        (written_by_a_view, []),
        (returned_twice, []),
        (without_autocast, ["embedding"]),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_is_rounded(after: Callable[..., Any], names: list[str]) -> None:
    plain, ours, seen = run(after)
    assert seen.names == names
    plain, ours = (each if isinstance(each, tuple) else (each,) for each in (plain, ours))
    for own, other in zip(ours, plain, strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "after",
    [counted, masked_by_the_batch, with_large_numbers, outside_of_autocast, added_to_a_sum_in_fp32, as_other_bits],
    ids=lambda f: f.__name__,
)
def test_what_is_no_activation_is_as_given(after: Callable[..., Any]) -> None:
    plain, ours, seen = run(after)
    assert seen.names == ["embedding"]
    for own, other in zip(ours, plain, strict=True):
        tolerance = 2e-2 if other.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def test_the_sums_of_a_residual_stream_are_in_half_precision() -> None:
    _, _, seen = run(residual)
    assert ("add", torch.bfloat16) in seen.dtypes and ("add", torch.float32) not in seen.dtypes


def test_what_a_model_casts_itself_stays_in_fp32() -> None:
    _, _, seen = run(cast_by_the_model)
    assert ("mul", torch.float32) in seen.dtypes


def test_nothing_is_rounded_without_autocast() -> None:
    plain, ours, seen = run(residual, enabled=False)
    assert seen.names == []
    assert torch.equal(plain, ours)


def test_a_graph_that_failed_leaves_autocast_and_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Rounding.run_node

    def failing(rounding: Rounding, node: torch.fx.Node) -> Any:
        if operation_of(node).name == "tanh":
            assert not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
            raise RuntimeError("no")
        return given(rounding, node)

    def blocks(model: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            x = torch.tanh(x)
        return model.head(x)

    monkeypatch.setattr(Rounding, "run_node", failing)
    _, _, seen = run(blocks)
    assert seen.names == []
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
