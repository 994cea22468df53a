"""These tests need a GPU of compute capability 8.0 or better, and Triton. tests/conftest.py skips them elsewhere."""

from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a minute or more")


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU, idle before and after the test; a fault of the GPU shows in the test that caused it."""
    gpu = torch.device("cuda", 0)
    torch.cuda.synchronize(gpu)
    yield gpu
    torch.cuda.synchronize(gpu)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
