import os

import pytest

from tuner.measuring.gpu_watch import GpuState, GpuWatch, NoWatch, watch_gpu, what_disturbed
from tuner.records import CauseKind

QUIET = GpuState(sm_mhz=1900, reasons=0, processes=frozenset({1, 2}))


def state(**changes: object) -> GpuState:
    fields = {"sm_mhz": 1900, "reasons": 0, "processes": frozenset({1, 2})}
    return GpuState(**{**fields, **changes})


@pytest.mark.parametrize(
    "now",
    [
        QUIET,
        state(reasons=0x1),  # idle
        state(reasons=0x4),  # at its power limit, as under every large product
        state(processes=frozenset({1})),  # somebody left
        state(processes=frozenset({1, 2, 7})),  # our own process
        state(sm_mhz=1500),
    ],
)
def test_what_is_no_disturbance(now):
    assert what_disturbed(QUIET, QUIET, now, 1900, {7}) is None


@pytest.mark.parametrize(
    ("now", "kind", "words"),
    [
        (state(reasons=0x8), CauseKind.GPU_CLOCK, "hardware slowdown"),
        (state(reasons=0x20 | 0x4), CauseKind.GPU_CLOCK, "thermal"),
        (state(reasons=0x40), CauseKind.GPU_CLOCK, "thermal"),
        (state(reasons=0x80), CauseKind.GPU_CLOCK, "power brake"),
        (state(processes=frozenset({1, 2, 99})), CauseKind.GPU_PROCESS, "PID 99"),
        (state(sm_mhz=1200), CauseKind.GPU_CLOCK, "clock"),
    ],
)
def test_what_is_one(now, kind, words):
    found = what_disturbed(QUIET, QUIET, now, 1900, {7})
    assert found.kind is kind
    assert words in found.seen


HOT = state(reasons=0x20)


def test_a_slowdown_disturbs_the_rounds_in_which_it_begins_and_ends(monkeypatch):
    states = iter([QUIET, HOT, state(reasons=0x60, sm_mhz=1200), state(reasons=0x40 | 0x4), QUIET, QUIET])
    monkeypatch.setattr(GpuWatch, "_state", lambda _: next(states))
    watch = GpuWatch(None)
    began, *lasted, ended, quiet = [watch.disturbance() for _ in range(5)]
    assert began == "the GPU throttled: thermal slowdown (software)"
    assert ended == "the GPU throttled: thermal slowdown (hardware)"
    assert lasted == [None, None]
    assert quiet is None


def test_a_slowdown_that_lasts_is_a_cause_all_the_same(monkeypatch):
    monkeypatch.setattr(GpuWatch, "_state", lambda _: HOT)
    watch = GpuWatch(None)
    assert watch.disturbance() is None
    assert [cause.seen for cause in watch.causes()] == ["the GPU throttled: thermal slowdown (software)"]


def test_causes_are_reported_at_the_end(monkeypatch):
    states = iter([state(processes=frozenset({os.getpid(), 5})), state(reasons=0x8), state()])
    monkeypatch.setattr(GpuWatch, "_state", lambda _: next(states))
    watch = GpuWatch(None)
    assert watch.disturbance() == "the GPU throttled: hardware slowdown"
    assert [cause.kind for cause in watch.causes()] == [CauseKind.GPU_CLOCK, CauseKind.GPU_PROCESS]
    assert watch.causes()[1].seen == "other processes were on this GPU all the time: PID 5"
    assert watch.causes()[1].seen in watch.notes()


def test_without_nvml_nothing_is_watched_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr("tuner.measuring.gpu_watch.pynvml", None)
    watch = watch_gpu("GPU-0")
    assert isinstance(watch, NoWatch)
    assert watch.disturbance() is None
    assert "not watched" in watch.notes()[0]
    assert watch.causes() == ()
    assert NoWatch().notes() == ()
