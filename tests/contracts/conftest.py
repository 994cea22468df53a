"""Each contract is tested in several worlds, which its test's name has in brackets: cpu, gpu, cpu-streams, gpu-streams.

`pytest tests/contracts -m gpu` runs those of a GPU. On streams of a CPU a test without the marker `on_streams` is one
of `-m minutes`; of TrainStep only tests with the marker run on streams at all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.worlds import device_of, streams_device_of

HERE = Path(__file__).parent
GPU = (pytest.mark.gpu, pytest.mark.filterwarnings("default"))  # each release of torch warns of something else


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_streams: a contract that is tested on several streams at every change")
    config.addinivalue_line("markers", "only_on_streams: a contract of launches on several streams")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", worlds_of(metafunc.definition))


def worlds_of(test: pytest.Function) -> list[object]:
    folder = test.path.relative_to(HERE).parts[0]
    if test.get_closest_marker("only_on_streams"):
        return [pytest.param("cpu-streams"), pytest.param("gpu-streams", marks=GPU)]
    worlds = [pytest.param("cpu"), pytest.param("gpu", marks=GPU)]
    if test.get_closest_marker("on_streams"):
        return [*worlds, pytest.param("cpu-streams"), pytest.param("gpu-streams", marks=GPU)]
    if folder == "step":
        return worlds
    rare = pytest.mark.minutes
    on_gpu = (*GPU, rare) if folder == "drop_in_models" else GPU
    return [*worlds, pytest.param("cpu-streams", marks=rare), pytest.param("gpu-streams", marks=on_gpu)]


@pytest.fixture
def device(world: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """A device on which the capture knob applies."""
    yield from device_of(world, monkeypatch, tmp_path)


@pytest.fixture
def streams_device(world: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """A device on which the knobs `streams` and `pool_bytes` apply."""
    yield from streams_device_of(world, monkeypatch, tmp_path)
