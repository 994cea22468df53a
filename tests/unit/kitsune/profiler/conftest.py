"""A GPU that is only pretended: events that are told apart from what waits for them."""

from dataclasses import dataclass, field

import pytest
import torch

from kitsune.profiler import clock

GPU = torch.device("cuda", 0)


@dataclass
class PretendedGpu:
    """Work is done by `run`; events happen at once, their times can be asked for after `synchronize` only."""

    now_ms: float = 0.0
    waits: int = 0
    done_until: int = 0
    recorded: list[float] = field(default_factory=list)
    is_capturing: bool = False

    def run(self, took_ms: float) -> None:
        self.now_ms += took_ms

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.waits += 1
        self.done_until = len(self.recorded)

    def event(self, *, enable_timing: bool) -> "PretendedEvent":
        assert enable_timing
        return PretendedEvent(self)


@dataclass
class PretendedEvent:
    gpu: PretendedGpu
    number: int = -1

    def record(self, stream: str) -> None:
        assert stream == "the current stream of cuda:0"
        self.number = len(self.gpu.recorded)
        self.gpu.recorded.append(self.gpu.now_ms)

    def query(self) -> bool:
        return self.number < self.gpu.done_until

    def elapsed_time(self, end: "PretendedEvent") -> float:
        assert self.query() and end.query(), "asked for before it was known"
        return self.gpu.recorded[end.number] - self.gpu.recorded[self.number]


@pytest.fixture
def gpu(monkeypatch):
    """The clock's whole view of CUDA; whoever changes the current device fails the test."""
    pretended = PretendedGpu()

    def refused(*_):
        raise AssertionError("the current device is the user's")

    monkeypatch.setattr(clock, "pick_device", lambda name: GPU)
    monkeypatch.setattr(clock, "synchronize", pretended.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", pretended.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pretended.is_capturing)
    monkeypatch.setattr(torch.cuda, "set_device", refused)
    return pretended


@pytest.fixture
def host_clock(monkeypatch):
    """The host's clock, moved by hand: seconds in `host_clock[0]`."""
    seconds = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: seconds[0])
    return seconds
