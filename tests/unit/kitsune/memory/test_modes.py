"""What a loader makes behind a prefetcher is what it makes without one, whatever modes its consumer is in."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from kitsune.memory import Prefetcher
from kitsune.memory.modes import modes


@contextlib.contextmanager
def by_default_on(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def inference_with_grad():
    with torch.inference_mode(), torch.enable_grad():
        yield


@contextlib.contextmanager
def all_at_once():
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.float16):
        yield


MODES = {
    "none": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "grad in no grad": lambda: torch.set_grad_enabled(True),
    "inference": torch.inference_mode,
    "inference with grad": inference_with_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without a cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast that is off": lambda: torch.autocast("cpu", enabled=False),
    "device": lambda: torch.device("meta"),
    "default device": lambda: by_default_on("meta"),
    "the usual device in another": lambda: torch.device("cpu"),
    "all": all_at_once,
}


def made(layer):
    """Batches of a loader that depends on every mode."""
    for _ in range(3):
        yield layer(torch.ones(1, 2, device="cpu")), torch.ones(2)


def seen(batches):
    return [(x.requires_grad, x.is_inference(), x.dtype, y.device, y.is_inference()) for x, y in batches]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_batches_are_made_in_the_modes_of_the_consumer(mode):
    layer = nn.Linear(2, 2)
    with mode():
        alone = seen(made(layer))
        assert seen(Prefetcher(device="cpu").wrap(made(layer))) == alone


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_consumer_keeps_its_own_modes(mode):
    layer = nn.Linear(2, 2)
    with mode():
        before = modes()
        list(Prefetcher(device="cpu").wrap(made(layer)))
        assert modes() == before
        assert torch.is_autocast_cache_enabled() == (mode is not MODES["autocast without a cache"])


def test_the_modes_are_those_at_the_beginning_of_each_iteration():
    layer = nn.Linear(2, 2)

    class Loader:
        def __iter__(self):
            return made(layer)

    with torch.no_grad():
        batches = Prefetcher(device="cpu").wrap(Loader())
    assert [x.requires_grad for x, _ in batches] == [True] * 3
    with torch.no_grad():
        iterator = iter(batches)
    assert [x.requires_grad for x, _ in iterator] == [False] * 3


def test_what_is_cast_ahead_is_shared_with_no_other_thread():
    """The cache of autocast knows no streams: a weight that is cast on one would be read on another."""
    layer, found = nn.Linear(2, 2), []

    def loader():
        for _ in range(2):
            found.append((threading.current_thread().name, torch.is_autocast_cache_enabled()))
            yield layer(torch.ones(1, 2))

    with torch.autocast("cpu", torch.bfloat16):
        list(Prefetcher(device="cpu").wrap(loader()))
    assert found == [("kitsune-prefetch", False)] * 2


def test_leaving_an_iteration_leaves_the_cache_of_the_consumer_alone(monkeypatch):
    layer, emptied = nn.Linear(2, 2), []
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: emptied.append(True))
        list(Prefetcher(device="cpu").wrap(made(layer)))
        monkeypatch.undo()
    assert emptied == []
