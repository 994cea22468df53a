"""These tests need a GPU of compute capability 8.0 or better, and Triton. tests/conftest.py skips them elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.worlds import forget_measurements, idle_gpu, let_more_streams_win


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a minute or more")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU machines bring a torch of their own, and each release warns of something else on its own account."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(autouse=True)
def nothing_found_by_another_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_measurements(monkeypatch, tmp_path)


@pytest.fixture
def more_streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    let_more_streams_win(monkeypatch)


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield from idle_gpu()
