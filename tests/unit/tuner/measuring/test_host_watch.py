import os
from dataclasses import replace

import pytest

from tuner.measuring.host_watch import TICKS_PER_S, HostCounters, HostWatch, what_disturbed
from tuner.records import CauseKind

FIRST = HostCounters(at_s=100.0, busy_s=50.0, idle_s=700.0, steal_s=1.0, own_s=2.0, throttled_s=0.0)
#: Ten seconds later, of eight cores: our own process kept one busy.
QUIET = replace(FIRST, at_s=110.0, busy_s=60.2, idle_s=769.8, own_s=12.0)


def kinds(now: HostCounters) -> list[CauseKind]:
    return [cause.kind for cause in what_disturbed(FIRST, now, 8)]


def test_what_is_no_disturbance():
    assert kinds(QUIET) == []
    assert kinds(FIRST) == [], "no time has gone by"


@pytest.mark.parametrize(
    ("now", "kind", "words"),
    [
        (
            replace(QUIET, busy_s=111.0, idle_s=719.0),
            CauseKind.LOAD,
            "other processes kept 5.1 of 8 cores busy",
        ),
        (
            replace(QUIET, steal_s=9.0, idle_s=761.8),
            CauseKind.STEAL,
            "other machines on the same host took 10% of the CPU time",
        ),
        (
            replace(QUIET, throttled_s=3.5),
            CauseKind.QUOTA,
            "the CPU limit of this container held it back 35% of the time",
        ),
    ],
)
def test_what_is_one(now, kind, words):
    (found,) = what_disturbed(FIRST, now, 8)
    assert (found.kind, found.seen) == (kind, words)


def test_the_files_of_the_kernel(tmp_path, monkeypatch):
    cores = os.cpu_count()
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("tuner.measuring.host_watch.time.monotonic", lambda: next(clock))

    def write(busy_s: float, idle_s: float, steal_s: float, throttled_us: int) -> None:
        ticks = [round(seconds * TICKS_PER_S) for seconds in (busy_s / 2, 0, busy_s / 2, idle_s, 0, 0, 0, steal_s)]
        (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, ticks))} 0 0\ncpu0 1 2 3\n")
        (tmp_path / "cpu.stat").write_text(f"usage_usec 5\nnr_throttled 2\nthrottled_usec {throttled_us}\n")

    (tmp_path / "loadavg").write_text("12.50 3.00 1.00 2/345 6789\n")
    write(100, 1000, 0, 0)
    watch = HostWatch(tmp_path, tmp_path)
    write(100 + 5 * cores, 1000 + 4 * cores, cores, 2_000_000)
    assert watch.disturbance() is None
    assert [cause.kind for cause in watch.causes()] == [CauseKind.LOAD, CauseKind.STEAL, CauseKind.QUOTA]
    assert watch.notes() == (f"load average 12.50 on {cores} cores",)


def test_without_proc_a_note_says_so(tmp_path):
    watch = HostWatch(tmp_path, tmp_path)
    assert watch.causes() == ()
    assert watch.notes() == ("load and steal of the processors were not watched: this system has no /proc/stat",)
