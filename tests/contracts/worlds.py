"""Where contracts hold: on a CPU with twins of CUDA graphs, on a GPU, and on either with several streams."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch

from kitsune.base.file_cache import KeyedFiles
from kitsune.capture.forward_dispatch import SegmentedForward
from kitsune.capture.step_graph import StepGraph
from kitsune.device.cuda_graph import Graph
from kitsune.fusion.benefits import Benefits
from kitsune.launches.plan_race import PlanRace
from kitsune.launches.timing_cache import TimingCache
from kitsune.techniques import TECHNIQUES
from tests.step_cases import capturing_cpu
from tests.unit.kitsune.launches.steps import even_us

#: What was made in this test on several streams.
STEPS: list[StepGraph] = []
FORWARDS: list[SegmentedForward] = []


class StepOnStreams(StepGraph):
    def __init__(self, *arguments):
        super().__init__(*arguments[:4], streams=4)
        STEPS.append(self)


class ForwardOnStreams(SegmentedForward):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **{**named, "streams": 3})
        FORWARDS.append(self)


def device_of(world: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[torch.device]:
    """For the time of one test."""
    kind, _, streams = world.partition("-")
    if streams:
        put_on_streams(monkeypatch)
    if kind == "cpu":
        monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
        yield capturing_cpu(monkeypatch)
        return
    if streams:
        let_more_streams_win(monkeypatch)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    forget_measurements(monkeypatch, folder)
    yield from idle_gpu()


def streams_device_of(world: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[torch.device]:
    """One on which the knobs `streams` and `pool_bytes` apply, for the time of one test."""
    if world.startswith("cpu"):
        for name in ("streams", "pool_bytes"):
            monkeypatch.setattr(TECHNIQUES[name], "why_not", lambda choice, facts: None)
        monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
        yield capturing_cpu(monkeypatch)
        return
    let_more_streams_win(monkeypatch)
    forget_measurements(monkeypatch, folder)
    yield from idle_gpu()


def put_on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitsune.step.StepGraph", StepOnStreams)
    monkeypatch.setattr("kitsune.runtime.drop_in_loop.SegmentedForward", ForwardOnStreams)
    STEPS.clear()
    FORWARDS.clear()


def let_more_streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that several streams are used, however small the step: each plan seems twice as fast as the one before."""
    seen: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
    numbers = itertools.count()

    def clock(graph: Graph) -> float:
        if graph not in seen:
            seen[graph] = next(numbers)
        return 0.5 ** seen[graph]

    monkeypatch.setattr(PlanRace, "clock", staticmethod(clock))


def forget_measurements(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nothing that another test has measured is found."""
    monkeypatch.setattr(TimingCache, "of_this_machine", lambda: TimingCache(KeyedFiles(folder / "timings")))
    monkeypatch.setattr(Benefits, "of_this_machine", lambda: Benefits(KeyedFiles(folder / "fusion")))


def idle_gpu() -> Iterator[torch.device]:
    """The first GPU, idle before and after the test; a fault of the GPU shows in the test that caused it."""
    gpu = torch.device("cuda", 0)
    torch.cuda.synchronize(gpu)
    yield gpu
    torch.cuda.synchronize(gpu)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
