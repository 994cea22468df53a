import pytest

from tuner.gpu_watch import GpuState, NoWatch, watch_gpu, what_disturbed

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
    assert what_disturbed(QUIET, now, 1900, {7}) is None


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (state(reasons=0x8), "hardware slowdown"),
        (state(reasons=0x20 | 0x4), "thermal"),
        (state(reasons=0x40), "thermal"),
        (state(reasons=0x80), "power brake"),
        (state(processes=frozenset({1, 2, 99})), "PID 99"),
        (state(sm_mhz=1200), "clock"),
    ],
)
def test_what_is_one(now, words):
    assert words in (what_disturbed(QUIET, now, 1900, {7}) or "")


def test_without_nvml_nothing_is_watched_and_that_is_said(monkeypatch):
    monkeypatch.setattr("tuner.gpu_watch.pynvml", None)
    watch = watch_gpu("GPU-0")
    assert isinstance(watch, NoWatch)
    assert watch.disturbance() is None
    assert "not watched" in watch.notes()[0]
    assert NoWatch().notes() == ()
