"""These tests need a GPU of compute capability 8.0 or better, and Triton. tests/conftest.py skips them elsewhere."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch

from kitsune.base.file_cache import KeyedFiles
from kitsune.device.cuda_graph import Graph
from kitsune.fusion.benefits import Benefits
from kitsune.launches.pipeline import Planner
from kitsune.launches.timing_cache import TimingCache


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a minute or more")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU machines bring a torch of their own, and each release warns of something else on its own account."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(autouse=True)
def nothing_found_by_another_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(TimingCache, "of_this_machine", lambda: TimingCache(KeyedFiles(tmp_path / "timings")))
    monkeypatch.setattr(Benefits, "of_this_machine", lambda: Benefits(KeyedFiles(tmp_path / "fusion")))


@pytest.fixture
def more_streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that several streams are used, however small the step: each plan seems twice as fast as the one before."""
    seen: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
    numbers = itertools.count()

    def clock(graph: Graph) -> float:
        if graph not in seen:
            seen[graph] = next(numbers)
        return 0.5 ** seen[graph]

    monkeypatch.setattr(Planner, "clock", staticmethod(clock))


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU, idle before and after the test; a fault of the GPU shows in the test that caused it."""
    gpu = torch.device("cuda", 0)
    torch.cuda.synchronize(gpu)
    yield gpu
    torch.cuda.synchronize(gpu)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
