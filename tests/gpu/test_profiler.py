"""What only a GPU shows of the profiler: times of its streams, no waiting, its memory, and streams side by side."""

import contextlib
import gc
import subprocess
import sys
import time

import pytest
import torch

from kitsune.errors import CaptureError
from kitsune.profiler import CUDATimer, MemoryTracker, MetricsCollector, StreamProfiler

CYCLES = 20_000_000  # of the GPU's clock: about 10 ms
MIB = 2**20


@contextlib.contextmanager
def no_waiting():
    """torch raises where it knows that the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_twice_the_work_takes_twice_the_time(device):
    timer = CUDATimer(device)
    timer.time(torch.cuda._sleep, CYCLES)  # the clock of an idle GPU is slow
    for _ in range(5):
        with timer.measure("once"):
            torch.cuda._sleep(CYCLES)
        with timer.measure("twice"):
            torch.cuda._sleep(2 * CYCLES)
    once, twice = min(timer.samples_ms("once")), min(timer.samples_ms("twice"))  # other tests may use the GPU, too
    assert once > 1.0
    assert twice / once == pytest.approx(2.0, rel=0.1)
    assert timer.get_elapsed("twice") == timer.samples_ms("twice")[-1]


def test_measuring_does_not_wait_for_the_gpu(device):
    timer, metrics = CUDATimer(), MetricsCollector()
    torch.cuda._sleep(1)
    begin_s = time.perf_counter()
    with no_waiting():
        for _ in range(20):
            with timer.measure("step"), metrics.measure_time("step"):
                torch.cuda._sleep(CYCLES)
    issued_ms = (time.perf_counter() - begin_s) * 1e3
    samples_ms = timer.samples_ms("step")
    assert issued_ms < 0.5 * sum(samples_ms)
    assert len(samples_ms) == 20
    assert metrics.summary()["step"].median == pytest.approx(sorted(samples_ms)[10], rel=0.2)


def test_calls_are_timed_one_by_one(device):
    times_ms = CUDATimer(device).time_iterations(lambda: torch.cuda._sleep(CYCLES), 4)
    assert len(times_ms) == 4
    assert min(times_ms) > 1.0


def test_a_region_is_timed_on_the_stream_that_is_current(device):
    """What another stream does at the same time is none of it."""
    timer, other = CUDATimer(device), torch.cuda.Stream(device)
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(other):
        torch.cuda._sleep(20 * CYCLES)
    with timer.measure("here"):
        torch.cuda._sleep(CYCLES)
    with torch.cuda.stream(other), timer.measure("there"):
        torch.cuda._sleep(3 * CYCLES)
    assert timer.get_elapsed("there") / timer.get_elapsed("here") == pytest.approx(3.0, rel=0.3)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_the_current_device_stays_what_it_is(device):
    with torch.cuda.device(1):
        timer = CUDATimer("cuda:0")
        with timer.measure("step"), MemoryTracker("cuda:0"):
            pass
        assert timer.get_elapsed("step") >= 0.0
        assert torch.cuda.current_device() == 1
        assert CUDATimer().device == torch.device("cuda", 1)


def test_a_capture_is_not_timed_and_goes_on(device):
    timer, x = CUDATimer(device), torch.ones(8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="time its replay"), timer.measure("step"):
            pass
        y = x + 1
    assert timer.time(graph.replay) > 0.0
    assert y.tolist() == [2.0] * 8


def test_the_peak_and_the_change_of_a_known_allocation(device):
    gc.collect()  # what earlier tests have left is not to go in the midst of this one
    torch.cuda.empty_cache()  # a block that is there already may be larger than what is asked for
    kept = torch.empty(8 * MIB, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated(device)
    with no_waiting(), MemoryTracker(device) as outer:
        passing = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        del passing
        with MemoryTracker(device) as inner:
            more = torch.empty(16 * MIB, dtype=torch.uint8, device=device)
            outer.snapshot("more")
            del kept
    assert (outer.peak_bytes - before, outer.allocated_bytes) == (64 * MIB, 8 * MIB)
    assert (inner.peak_bytes - before, inner.allocated_bytes) == (16 * MIB, 8 * MIB)
    assert outer.snapshots["more"].allocated_bytes == before + 16 * MIB
    assert outer.source == "tensors on cuda:0"
    assert more.numel() == 16 * MIB


def test_the_command_tells_the_peak_on_the_gpu_and_touches_cuda_after_the_script_only(device, tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch\nassert not torch.cuda.is_initialized()\n"
        "x = torch.empty(64 * 2**20, dtype=torch.uint8, device='cuda')\ndel x\n",
        "utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "kitsune.profiler.memory_tracker", str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["tensors", "on", "cuda:0", "64.0", "MiB", "0.0", "MiB", "0.0", "MiB"]


def test_a_tracker_may_be_the_first_to_use_cuda(device):
    program = (
        "from kitsune.profiler import MemoryTracker\nwith MemoryTracker('cuda:0') as t: pass\nassert not t.peak_bytes"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=55)


def test_two_streams_that_run_side_by_side_overlap_and_one_does_not(device):
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def side_by_side():
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10 * CYCLES)

    def in_line():
        for _ in range(2):
            torch.cuda._sleep(CYCLES)

    side_by_side()
    both = StreamProfiler(side_by_side, device).run()
    assert [use.kernels for use in both.streams] == [1, 1]
    assert both.overlap_share > 0.5
    assert both.busy_ms < sum(use.busy_ms for use in both.streams)
    one = StreamProfiler(in_line).run()
    assert [use.kernels for use in one.streams] == [2]
    assert one.overlap_share == 0.0


def test_a_copy_keeps_a_stream_busy_and_is_no_kernel(device):
    x = torch.ones(MIB, device=device)
    found = StreamProfiler(lambda: torch.empty_like(x).copy_(x).add_(1), device).run()
    assert [(use.kernels, use.moves) for use in found.streams] == [(1, 1)]


def test_a_function_that_leaves_the_gpu_idle_has_no_streams(device):
    with pytest.raises(CaptureError, match="none ran"):
        StreamProfiler(lambda: None, device).run()
