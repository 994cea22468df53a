"""The drop-in where launches cannot be planned for several streams."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kitsune.optimizer import KitsuneOptimizer
from tests.contracts.towers import towers, trained
from tests.contracts.worlds import streams_device_of


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    yield from streams_device_of("cpu", monkeypatch, tmp_path)


def test_launches_that_cannot_be_planned_leave_the_graphs_and_say_why(device):
    plain, model = towers(device, asks=True), towers(device, asks=True)
    optimizer = KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_streams=3)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert all(map(torch.equal, trained(model, optimizer), expected))
    assert optimizer.report.applied == {"capture": "segments"}
    assert "depends on the data" in optimizer.report.declined["streams"]
    assert optimizer.counts["captured"] > 0
    optimizer.close()
