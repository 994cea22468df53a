"""What the runtime asks a device, as answered for a CPU."""

import pytest
import torch

from kitsune.device import backend as devices
from kitsune.device.backend import environment, first_line, make_current, pick_device
from kitsune.errors import UnfitError
from kitsune.plan import Match

CPU = torch.device("cpu")


def test_a_cpu_is_picked_by_name():
    assert pick_device("cpu") == CPU
    assert pick_device("cpu:0") == CPU


@pytest.mark.parametrize("name", ["tpu9", "", "meta", "xpu"])
def test_a_name_that_is_no_device(name):
    with pytest.raises(UnfitError, match="use cpu, cuda or cuda:N"):
        pick_device(name)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == CPU
    with pytest.raises(UnfitError, match="torch sees no GPU here"):
        pick_device("cuda:1")


def test_a_gpu_beyond_the_last(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick_device() == torch.device("cuda", 1)
    assert pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(UnfitError, match="there are only 2 GPUs"):
        pick_device("cuda:2")


def test_only_a_gpu_is_made_current(monkeypatch):
    current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    make_current(CPU)
    make_current(torch.device("cuda", 1))
    assert current == [1]


def test_the_environment_of_a_cpu():
    here = environment(CPU)
    assert (here.device, here.torch, here.cuda, here.driver) == ("cpu", torch.__version__, "", "")
    assert here.gpu
    assert here.memory_bytes > 2**20
    assert here.match(environment(CPU))[0] is Match.EXACT


def test_a_cpu_has_no_memory_counters_and_no_syncs():
    found: list[devices.Sync] = []
    devices.reset_peak(CPU)
    with devices.watch_syncs(CPU, found), devices.side_stream(CPU):
        kept = torch.ones(1000).sum().item()
    devices.synchronize(CPU)
    assert (kept, devices.allocated_bytes(CPU), devices.peak_bytes(CPU), found) == (1000.0, 0, 0, [])


def test_the_state_of_the_generators_can_be_put_back():
    state = devices.rng_state(CPU)
    first = torch.rand(3)
    devices.set_rng_state(CPU, state)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("  padded \n"), "padded"),
        (KeyError(), "KeyError"),
        (ValueError("the compiler raised:\n  it broke\nmore"), "the compiler raised: it broke"),
        (ValueError("and so on:"), "and so on:"),
        (ValueError("x" * 900), "x" * 500),
    ],
)
def test_the_first_line_of_an_error(error, line):
    assert first_line(error) == line
