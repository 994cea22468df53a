"""Regions timed on a pretended GPU, where waiting is counted, and by a host's clock that is moved by hand."""

import pytest
import torch

from kitsune.errors import CaptureError, SettingsError, UnfitError
from kitsune.profiler import CUDATimer
from kitsune.profiler.clock import MOST_PENDING


def test_measuring_never_waits_and_asking_waits_once(gpu):
    timer = CUDATimer()
    for took_ms in (3.0, 1.0, 2.0):
        with timer.measure("forward"):
            gpu.run(took_ms)
        gpu.run(10.0)
        with timer.measure("backward"):
            gpu.run(2 * took_ms)
    assert gpu.waits == 0
    assert timer.samples_ms("forward") == (3.0, 1.0, 2.0)
    assert gpu.waits == 1
    assert timer.get_elapsed("backward") == 4.0
    assert timer.samples_ms("backward") == (6.0, 2.0, 4.0)
    assert gpu.waits == 1  # nothing was left to wait for
    assert timer.names == ("forward", "backward")


def test_nested_regions_hold_each_other(gpu):
    timer = CUDATimer()
    with timer.measure("step"):
        gpu.run(1.0)
        with timer.measure("part"), timer.measure("step"):
            gpu.run(2.0)
    assert timer.samples_ms("part") == (2.0,)
    assert timer.samples_ms("step") == (2.0, 3.0)


def test_start_and_stop_are_a_region_and_may_be_nested(gpu):
    timer = CUDATimer()
    timer.start("a")
    gpu.run(1.0)
    timer.start("b")
    timer.start("a")
    gpu.run(2.0)
    timer.stop("a")
    timer.stop("b")
    gpu.run(4.0)
    timer.stop("a")
    assert timer.samples_ms("a") == (2.0, 7.0)
    assert timer.get_elapsed("b") == 2.0


def test_calls_are_issued_without_waiting_in_between(gpu):
    waited = []

    def function(took_ms=5.0, *, more_ms=0.0):
        waited.append(gpu.waits)
        gpu.run(took_ms + more_ms)

    timer = CUDATimer()
    assert timer.time_iterations(function, 3) == (5.0, 5.0, 5.0)
    assert (waited, gpu.waits) == ([0, 0, 0], 1)
    assert timer.time(function, 2.0, more_ms=0.5) == 2.5
    assert timer.names == ()


def test_what_has_ended_is_read_on_the_way_without_waiting(gpu):
    timer = CUDATimer()
    for number in range(MOST_PENDING + 1):
        with timer.measure("step"):
            gpu.run(float(number))
        gpu.done_until = len(gpu.recorded) - 2  # for the next region, the GPU is two behind
    assert len(timer._clock._pending) == 2
    assert gpu.waits == 0
    assert timer.samples_ms("step") == tuple(map(float, range(MOST_PENDING + 1)))


def test_a_region_that_raises_gives_no_sample(gpu):
    timer = CUDATimer()
    with pytest.raises(ZeroDivisionError), timer.measure("step"):
        gpu.run(1.0 / 0)
    with pytest.raises(SettingsError, match="nothing was timed as 'step'; there is nothing"):
        timer.get_elapsed("step")


def test_nothing_is_timed_while_a_graph_is_captured(gpu):
    gpu.is_capturing = True
    with pytest.raises(CaptureError, match="time its replay"), CUDATimer().measure("step"):
        pass


def test_a_cpu_is_timed_in_milliseconds_by_the_hosts_clock(host_clock):
    timer = CUDATimer("cpu")
    assert timer.device == torch.device("cpu")
    with timer.measure("step"):
        host_clock[0] += 0.25
    assert timer.get_elapsed("step") == 250.0
    timer.start("step")
    host_clock[0] += 0.5
    timer.stop("step")
    assert timer.samples_ms("step") == (250.0, 500.0)


def test_a_cpu_really_takes_time():
    timer = CUDATimer(torch.device("cpu"))
    x = torch.ones(200_000)
    few = min(timer.time(x.exp) for _ in range(5))  # one that nobody disturbed
    assert 0 < few < timer.time(lambda: [x.exp() for _ in range(300)])


def test_an_unknown_name_is_told_with_those_that_are_there():
    timer = CUDATimer("cpu")
    with timer.measure("forward"):
        pass
    with pytest.raises(SettingsError, match="nothing was timed as 'fwd'; there is 'forward'"):
        timer.samples_ms("fwd")


def test_a_stop_without_a_start_is_refused():
    timer = CUDATimer("cpu")
    timer.start("a")
    with pytest.raises(SettingsError, match="'a' was started and not stopped"):
        timer.get_elapsed("a")
    timer.stop("a")
    for name in ("a", "b"):
        with pytest.raises(SettingsError, match=f"not started for '{name}'"):
            timer.stop(name)


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3"])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(SettingsError, match="at least 1"):
        CUDATimer("cpu").time_iterations(lambda: None, count)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CUDATimer().device == torch.device("cpu")
    with pytest.raises(UnfitError, match="no GPU here"):
        CUDATimer("cuda:0")
