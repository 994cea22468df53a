"""What every kernel must do on a GPU: run on the stream that is current, and again in a replayed CUDA graph."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kitsune.kernels.products import HAS_GLUON, HOPPER

Step = Callable[..., Sequence[torch.Tensor]]

SLOW_CYCLES = 50_000_000  # some 25 ms, in which a kernel on another stream would read zeros


def check_current_stream(step: Step, given: Sequence[torch.Tensor]) -> None:
    """`step` gives the same bits where its first input is written late, on a stream of its own."""
    wanted = step(*given)
    late = torch.zeros_like(given[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream(late.device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
        late.copy_(given[0])
        found = step(late, *given[1:])
    side.synchronize()
    assert all(map(torch.equal, found, wanted))


def check_graph(step: Step, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """`step`, captured on `first`, computes on what those tensors hold when it is replayed."""
    wanted = step(*second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*first)
    for old, new in zip(first, second, strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))


def takes_gluon() -> bool:
    """Whether the kernels in Gluon run here."""
    return HAS_GLUON and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


def spied(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of a function from now on."""
    function, calls = getattr(module, name), []

    def spy(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(module, name, spy)
    return calls
