"""Blocks whose memory is known: on a counter that is moved by hand, and in this process as the kernel counts it."""

import mmap
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kitsune.errors import SettingsError, UnfitError
from kitsune.profiler import MemoryTracker, gauge, memory_tracker, resident
from kitsune.profiler.gauge import RESIDENT, SAMPLED, Gauge
from kitsune.profiler.memory_tracker import Change, Snapshot
from kitsune.profiler.resident import Resident

MIB = 2**20


@dataclass
class Counter:
    """A memory of which one knows what was in it."""

    level: int = 0
    highest: int = 0
    can_reset: bool = True

    def take(self, nbytes):
        self.level += nbytes
        self.highest = max(self.highest, self.level)

    def now(self):
        return self.level

    def peak(self):
        return self.highest

    def reset(self):
        if self.can_reset:
            self.highest = self.level
        return self.can_reset


@pytest.fixture
def counter(monkeypatch):
    made = Counter()
    shared = Gauge(made, "exact", "sampled")
    monkeypatch.setattr(memory_tracker, "gauge_of", lambda device: shared)
    return made


def test_the_peak_and_the_change_of_a_block(counter):
    counter.take(10)
    counter.take(500)
    counter.take(-500)
    with MemoryTracker("cpu") as tracker:
        counter.take(100)
        counter.take(-70)
        assert (tracker.peak_bytes, tracker.allocated_bytes) == (110, 30)
        counter.take(-20)
    counter.take(1000)
    assert (tracker.peak_bytes, tracker.allocated_bytes) == (110, 10)
    assert tracker.source == "exact"


def test_an_inner_tracker_takes_no_peak_from_the_outer_one_and_sees_its_own_only(counter):
    with MemoryTracker("cpu") as outer:
        counter.take(100)
        counter.take(-90)
        with MemoryTracker("cpu") as inner:
            counter.take(20)
            counter.take(-25)
        with MemoryTracker("cpu") as second:
            pass
        counter.take(1)
    assert (outer.peak_bytes, outer.allocated_bytes) == (100, 6)
    assert (inner.peak_bytes, inner.allocated_bytes) == (30, -5)
    assert (second.peak_bytes, second.allocated_bytes) == (5, 0)


def test_a_peak_of_the_inner_block_is_one_of_the_outer_too(counter):
    with MemoryTracker("cpu") as outer, MemoryTracker("cpu"):
        counter.take(100)
        counter.take(-100)
    assert outer.peak_bytes == 100


def test_trackers_may_overlap_in_any_order(counter):
    first, second = MemoryTracker("cpu"), MemoryTracker("cpu")
    first.__enter__()
    counter.take(50)
    second.__enter__()
    counter.take(-10)
    first.__exit__(None, None, None)
    counter.take(100)
    second.__exit__(None, None, None)
    assert (first.peak_bytes, second.peak_bytes) == (50, 140)


def test_snapshots_are_compared_by_their_labels(counter):
    with MemoryTracker("cpu") as tracker:
        counter.take(5)
        first = tracker.snapshot("forward")
        counter.take(7)
        counter.take(-10)
        second = tracker.snapshot("backward")
    assert (first, second) == (Snapshot("forward", 5, 5), Snapshot("backward", 2, 12))
    assert tracker.compare("forward", "backward") == Change("forward", "backward", -3, 7)
    assert tracker.compare("backward", "forward") == Change("backward", "forward", 3, -7)
    with pytest.raises(SettingsError, match="no snapshot 'update'; there is 'forward', 'backward'"):
        tracker.compare("forward", "update")


def test_the_newest_snapshot_of_a_label_counts_and_a_new_block_has_none(counter):
    tracker = MemoryTracker("cpu")
    with tracker:
        for _ in range(2):
            counter.take(3)
            tracker.snapshot("step")
    assert tracker.snapshots == {"step": Snapshot("step", 6, 6)}
    with tracker:
        pass
    assert tracker.snapshots == {}
    assert (tracker.peak_bytes, tracker.allocated_bytes) == (6, 0)


def test_a_counter_that_cannot_be_reset_is_sampled_and_says_so(counter):
    counter.can_reset = False
    counter.take(100)
    counter.take(-100)
    with MemoryTracker("cpu") as tracker:
        counter.take(30)
        counter.take(-10)
        tracker.snapshot("here")
        counter.take(-20)
    assert tracker.source == "sampled"
    assert tracker.peak_bytes == 20  # not 100, which was before, and of the 30 nobody knows
    with MemoryTracker("cpu") as tracker:
        counter.take(150)
        counter.take(-150)
    assert tracker.peak_bytes == 150  # a new record is seen


def test_a_tracker_says_when_it_is_used_outside_of_its_block(counter):
    tracker = MemoryTracker("cpu")
    for ask in (lambda: tracker.peak_bytes, lambda: tracker.allocated_bytes):
        with pytest.raises(SettingsError, match="nothing was tracked yet"):
            ask()
    with tracker, pytest.raises(SettingsError, match="is active already"):
        tracker.__enter__()
    with pytest.raises(SettingsError, match="belongs into the block"):
        tracker.snapshot("late")


def test_a_block_that_raises_is_tracked_to_its_end(counter):
    tracker = MemoryTracker("cpu")
    with pytest.raises(TypeError), tracker:
        len(counter.take(9))
    counter.take(100)
    assert tracker.peak_bytes == tracker.allocated_bytes == 9


# This process ---------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_resident_memory_of_this_process_is_tracked():
    with MemoryTracker("cpu") as tracker:
        tracker.snapshot("before")
        block = mmap.mmap(-1, 64 * MIB)  # malloc might have so much left, and take nothing from the kernel
        block[:: mmap.PAGESIZE] = bytes(64 * MIB // mmap.PAGESIZE)
        tracker.snapshot("with it")
        block.close()
        tracker.snapshot("without it")
    assert tracker.source == RESIDENT
    assert tracker.compare("before", "with it").allocated_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert tracker.compare("with it", "without it").allocated_bytes == pytest.approx(-64 * MIB, rel=0.1)
    assert tracker.peak_bytes >= tracker.snapshots["with it"].allocated_bytes
    assert abs(tracker.allocated_bytes) < 8 * MIB


def test_a_peak_from_before_the_block_is_none_of_it():
    np.ones(128 * MIB, dtype=np.uint8)
    with MemoryTracker("cpu") as tracker:
        level = tracker.snapshot("level").allocated_bytes
    assert tracker.peak_bytes < level + 32 * MIB


def test_where_the_kernel_does_not_allow_a_reset_the_memory_is_sampled(monkeypatch, tmp_path):
    monkeypatch.setattr(resident, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    monkeypatch.setattr(memory_tracker, "gauge_of", gauge.gauge_of.__wrapped__)
    with MemoryTracker("cpu") as tracker:
        pass
    assert tracker.source == SAMPLED
    assert tracker.peak_bytes >= MIB


def test_where_the_kernel_tells_less_the_highest_is_asked_of_getrusage(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    2048 kB\n", "utf-8")
    monkeypatch.setattr(resident, "STATUS", tmp_path / "status")
    assert Resident().now() == 2 * MIB
    assert Resident().peak() > 2 * MIB
    assert Resident().reset() is False


@pytest.mark.parametrize("text", [None, "Name:\tpython\n"])
def test_where_the_kernel_tells_nothing_there_is_nothing_to_track(monkeypatch, tmp_path, text):
    if text:
        (tmp_path / "status").write_text(text, "utf-8")
    monkeypatch.setattr(resident, "STATUS", tmp_path / "status")
    with pytest.raises(UnfitError, match="on Linux only"):
        Resident().now()


def test_on_a_gpu_torchs_own_counters_are_read_and_cuda_is_there_before_they_are_reset(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(gauge.devices, "allocated_bytes", lambda device: 5)
    monkeypatch.setattr(gauge.devices, "peak_bytes", lambda device: 9 if len(calls) == 2 else 5)
    monkeypatch.setattr(gauge.devices, "reset_peak", lambda device: calls.append(str(device)))
    found = gauge.gauge_of.__wrapped__(torch.device("cuda", 1))
    watch = found.begin()
    assert calls == ["init", "cuda:1"]
    assert (found.end(watch), watch.begin_bytes, watch.highest_bytes) == (5, 5, 9)
    assert found.source == "tensors on cuda:1"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnfitError, match="no GPU here"):
        MemoryTracker("cuda:0")


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs a script through the command, in this process; gives what it left in the module and on the terminal."""
    main = sys.modules["__main__"]

    def run(text, *arguments):
        (tmp_path / "script.py").write_text(text, "utf-8")
        try:
            memory_tracker.main(["script.py", *arguments])
        finally:
            run.module = sys.modules["__main__"]
            run.out, run.err = capsys.readouterr()
        return run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(sys, "path", ["the working folder", *sys.path[1:]])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield run
    sys.modules["__main__"] = main


def test_a_script_runs_as_the_main_module_with_its_arguments(command, tmp_path):
    module = command(
        '"""A script."""\nimport sys\nargv, name, file, first = sys.argv, __name__, __file__, sys.path[0]\n'
        "main = sys.modules['__main__'].__dict__ is globals()\nprint('hello')",
        "--epochs",
        "3",
    ).module
    assert (module.argv, module.name) == (["script.py", "--epochs", "3"], "__main__")
    assert (module.file, module.first) == (str(tmp_path / "script.py"), str(tmp_path))
    assert module.main
    assert module.__doc__ == "A script."


def test_the_table_tells_the_peak_of_the_script(command):
    lines = command("x = bytearray(100 * 2**20)\ndel x\nprint('hello')").out.splitlines()
    assert lines[0] == "hello"
    assert lines[1].split() == ["memory", "peak", "before", "the", "script", "after", "it"]
    assert lines[2].startswith(RESIDENT)
    peak, _, before, _, _, _ = lines[2].removeprefix(RESIDENT).replace(",", "").split()
    assert 95 < float(peak) - float(before) < 140


def test_gpus_that_the_script_used_are_told_instead(command, monkeypatch):
    gauges = {index: Gauge(Counter(level, highest), f"tensors on cuda:{index}") for index, level, highest in USED}
    host = gauge.gauge_of(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(memory_tracker, "gauge_of", lambda device: gauges.get(device.index, host))
    lines = command("").out.splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["tensors", "on", "cuda:0", "4,096.0", "MiB", "0.0", "MiB", "2.0", "MiB"],
        ["tensors", "on", "cuda:2", "1.5", "MiB", "0.0", "MiB", "0.0", "MiB"],
    ]


USED = ((0, 2 * MIB, 4096 * MIB), (1, 0, 0), (2, 0, 3 * MIB // 2))


def test_a_script_that_exits_is_told_of_and_its_code_comes_through(command):
    with pytest.raises(SystemExit) as exit_:
        command("import sys\nsys.exit(3)")
    assert exit_.value.code == 3
    assert RESIDENT in command.out


def test_an_error_comes_through_with_a_traceback_that_begins_in_the_script(command, tmp_path):
    shown = []
    sys.excepthook = lambda *error: shown.append(error)  # as a script may do
    with pytest.raises(ZeroDivisionError) as caught:
        command("def f():\n    1 / 0\nf()")
    assert RESIDENT in command.out
    sys.excepthook(ZeroDivisionError, caught.value, caught.value.__traceback__)
    ((kind, error, traceback),) = shown
    assert (kind, error.__traceback__) == (ZeroDivisionError, traceback)
    lines = []
    while isinstance(traceback, types.TracebackType):
        lines.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    assert lines == [(str(tmp_path / "script.py"), 3), (str(tmp_path / "script.py"), 2)]


def test_a_stdout_that_was_closed_changes_nothing_about_the_script(command, monkeypatch):
    with (Path(os.devnull)).open("w", encoding="utf-8") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        command("import sys\nsys.stdout.close()")
    assert "the memory of the script cannot be printed" in command.err


@pytest.mark.parametrize(("words", "code"), [((), 2), (("--frob",), 2), (("--help",), 0)])
def test_the_usage_is_told(words, code, capsys):
    with pytest.raises(SystemExit) as exit_:
        memory_tracker.main(words)
    assert exit_.value.code == code
    streams = capsys.readouterr()
    assert streams[0 if code == 0 else 1].startswith("usage: python -m kitsune.profiler.memory_tracker SCRIPT")
    assert streams[1 if code == 0 else 0] == ""


def test_a_script_that_is_not_there_is_told(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        memory_tracker.main([str(tmp_path / "none.py")])
    assert exit_.value.code == 2
    assert "none.py cannot be read: No such file" in capsys.readouterr().err
