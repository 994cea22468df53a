"""Counters of batch norms are counted by one call, and come to the same numbers."""

import copy

import pytest
import torch
from torch import nn

from kitsune.fusion.counters import merge_counters
from kitsune.fusion.operations import memory_of
from tests.step_cases import batches


class Norms(nn.Sequential):
    def __init__(self, count: int) -> None:
        super().__init__(*(nn.BatchNorm1d(8) for _ in range(count)))


class Reads(Norms):
    """Reads the first counter beside counting."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (1 + self[0].num_batches_tracked)


class Shares(Norms):
    """The first two counters are one."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self[1].num_batches_tracked = self[0].num_batches_tracked.view(())


class CountsByTwo(Norms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self[0].num_batches_tracked.add_(2)
        return super().forward(x)


def counted(model: nn.Module, steps: int = 3) -> tuple[int, list[str]]:
    """(how many counters were merged, the calls of the graph that is left); the model runs so many steps."""
    found: list[int] = []
    left: list[str] = []

    def look(graph, _):
        found.append(merge_counters(graph))
        left.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=look)
    for x, _ in batches(steps):
        compiled(x)
    return found[0], left


@pytest.mark.parametrize(
    ("make", "merged"),
    [
        (lambda: Norms(3), 3),
        (lambda: Norms(1), 0),
        (lambda: Reads(3), 2),
        (lambda: CountsByTwo(3), 2),
        (lambda: Shares(4), 2),
    ],
    ids=["three", "one", "one is read", "one counts otherwise", "two are one"],
)
def test_counters_come_to_the_same_numbers(make, merged):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    found, left = counted(model)
    for x, _ in batches(3):
        plain(x)
    assert found == merged
    assert sum("foreach_add_" in call for call in left) == (merged > 0)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_a_tensor_that_is_not_strided_has_no_memory_to_share():
    assert memory_of(torch.eye(2).to_sparse()) is None
    assert memory_of(3) is None
    rows = torch.eye(2)
    assert memory_of(rows) == memory_of(rows[1:])
