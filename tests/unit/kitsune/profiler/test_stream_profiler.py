"""Events made by hand, whose overlap one can count, and what is refused without a GPU."""

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from kitsune.errors import CaptureError, UnfitError
from kitsune.profiler import StreamProfiler, streams
from kitsune.profiler.streams import StreamUse, busy_us, profile_of


def event(stream, begin_us, end_us, name="gemm", *, device=0, kind=DeviceType.CUDA, is_annotation=False):
    return FunctionEvent(
        id=1,
        name=name,
        thread=1,
        start_us=begin_us,
        end_us=end_us,
        device_type=kind,
        device_index=device,
        device_resource_id=stream,
        is_user_annotation=is_annotation,
    )


EVENTS = [
    event(7, 0, 4000),
    event(20, 1000, 3000),
    event(7, 5000, 6000, "Memcpy DtoD (Device -> Device)"),
    event(21, 2000, 5500),
    event(20, 9000, 9500),
]


def test_what_each_stream_did_and_when_two_did_something():
    found = profile_of(EVENTS, 0)
    assert found.streams == (
        StreamUse(stream=7, busy_ms=5.0, kernels=1, moves=1),
        StreamUse(stream=21, busy_ms=3.5, kernels=1, moves=0),
        StreamUse(stream=20, busy_ms=2.5, kernels=2, moves=0),
    )
    assert found.kernels == 4
    assert found.busy_ms == 6.5  # 0 to 6000 and 9000 to 9500
    assert found.overlap_ms == 3.5  # 1000 to 4000 and 5000 to 5500
    assert found.overlap_share == 3.5 / 6.5


def test_what_belongs_to_another_gpu_or_the_host_or_is_a_name_is_none_of_it():
    others = [
        event(20, 0, 9000, device=1),
        event(20, 0, 9000, kind=DeviceType.CPU),
        event(20, 0, 9000, is_annotation=True),
    ]
    assert profile_of([*EVENTS, *others], 0) == profile_of(EVENTS, 0)


def test_one_stream_does_not_overlap_with_itself():
    found = profile_of([event(7, 0, 3000), event(7, 2000, 4000), event(7, 4000, 5000)], 0)
    assert (found.busy_ms, found.overlap_ms, found.overlap_share) == (5.0, 0.0, 0.0)
    assert found.streams[0].busy_ms == 5.0


def test_streams_that_take_turns_do_not_overlap():
    assert busy_us([[(0, 10)], [(10, 20)]], 2) == 0
    assert busy_us([[(0, 10)], [(10, 20)]], 1) == 20
    assert busy_us([[(0, 10)], [(2, 8)], [(4, 6)]], 3) == 2
    assert busy_us([], 1) == 0


def test_a_profile_is_told_in_words():
    header, first, *_, last = str(profile_of(EVENTS, 0)).splitlines()
    assert header.split() == ["stream", "busy", "ms", "kernels", "copies", "and", "fills"]
    assert first.split() == ["7", "5", "1", "1"]
    assert last == "Two or more streams are busy for 3.5 ms, 53.8% of the 6.5 ms in which any is."


def test_torchs_events_tell_what_is_read_of_them():
    """Of the host's kind, since there is no GPU: times, device and where it ran are those of the operators."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        torch.ones(1000).exp()
    (found,) = [one for one in profiled.events() if one.name == "aten::exp"]
    assert found.time_range.end > found.time_range.start
    assert isinstance(found.device_resource_id, int)
    assert not found.is_user_annotation


def test_a_cpu_has_no_streams():
    with pytest.raises(UnfitError, match="a CPU has no CUDA streams"):
        StreamProfiler(lambda: None, "cpu")


@pytest.fixture
def pretended(monkeypatch):
    """A GPU on which nothing runs."""
    monkeypatch.setattr(streams, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(streams, "synchronize", lambda device: None)


def test_two_profilers_are_in_each_others_way(pretended):
    profiler = StreamProfiler(lambda: None)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True), pytest.raises(CaptureError, match="only one can"):
        profiler.run()


def test_a_function_that_raises_leaves_no_profiler_behind(pretended, monkeypatch):
    monkeypatch.setattr(streams, "profile", lambda **_: profile(activities=[ProfilerActivity.CPU], acc_events=True))
    with pytest.raises(ZeroDivisionError):
        StreamProfiler(lambda: 1 / 0).run()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        pass


def test_a_function_without_kernels_has_nothing_to_show(pretended, monkeypatch):
    calls = []
    monkeypatch.setattr(streams, "profile", lambda **_: profile(activities=[ProfilerActivity.CPU], acc_events=True))
    with pytest.raises(CaptureError, match="none ran"):
        StreamProfiler(lambda: calls.append(1)).run()
    assert calls == [1]
