"""Times the steps of a user's loop as given, and then by the plan.

A step lasts from one update to the next, the loop's own work on batches included. Nothing waits for the device before
the results are asked for, except two steps under torch.profiler: the last one as given, and one by the plan. They are
not timed. The profiler leaves CUPTI attached, which makes launches by the host slower from then on
(docs/decisions/0091), so it is not used before the steps as given are timed.
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from math import nan
from typing import Any, Final

import torch

from kitsune.device.backend import first_line, graph_pool_bytes
from kitsune.errors import SURPRISES, CaptureError
from kitsune.profiler.clock import Clock, Mark
from kitsune.profiler.gauge import Gauge, MemoryWatch, gauge_of
from kitsune.profiler.step_counter import StepCount, StepCounter
from kitsune.profiler.streams import StreamProfile
from kitsune.runtime.run_stats import Stats, as_json, is_missing

CALIBRATION_STEPS: Final = 14  # as given, before the plan is applied; COLD_STEPS of them set up libraries
COLD_STEPS: Final = 4
LEAST_STEPS: Final = 5
KEPT_STEPS: Final = 500  # of each kind, the newest
GIVEN, PLANNED = "as given", "by the plan"
MIB: Final = 2**20
NO_COUNT: Final = "torch does not count memory on a CPU"
NO_LAUNCHES: Final = "a CPU launches no kernels"
NO_STREAMS: Final = "a CPU has no CUDA streams"
NO_REQUEST: Final = "the step asked for no memory"
ONE_STREAM: Final = "all that the step launched ran on one stream"


class StepProfile:
    """Call `mark` after every update. Until `is_calibrated` nothing of the plan may have been applied.

    `why_unplanned` tells why no step ran by the plan, "" where that is only a matter of time.
    """

    def __init__(self, device: torch.device, why_unplanned: Callable[[], str] = str) -> None:
        self._device = device
        self._why_unplanned = why_unplanned
        self._is_gpu = device.type == "cuda"
        self._marks = 0
        self._clock = Clock(device)
        self._last: Mark | None = None
        # Bytes in tensors: a process holds more than that, and a CPU's cannot be told apart.
        self._gauge: Gauge | None = gauge_of(device) if self._is_gpu else None
        self._watch: MemoryWatch | None = None
        self._steps = {kind: deque[float](maxlen=KEPT_STEPS) for kind in (GIVEN, PLANNED)}
        self._counting: tuple[str, StepCounter] | None = None
        self._counts: dict[str, StepCount] = {}
        self._uncounted: dict[str, str] = {}
        self._given_peak_bytes = nan
        self._is_planned = False

    @property
    def is_calibrated(self) -> bool:
        return self._marks >= CALIBRATION_STEPS

    @property
    def streams(self) -> StreamProfile | None:
        """What ran on the streams of a GPU in the step by the plan that was counted."""
        return self._counts[PLANNED].streams if PLANNED in self._counts else None

    def mark(self, *, by_plan: bool) -> None:
        """The end of a step; `by_plan`: all of the next one is expected to run by the plan."""
        was_counted = self._end_count(by_plan=by_plan)
        now = self._clock.mark()
        if self._last is not None and not was_counted:
            if COLD_STEPS < self._marks < CALIBRATION_STEPS:
                self._clock.keep(self._last, now, self._steps[GIVEN].append)
            elif self._is_planned and by_plan:
                self._clock.keep(self._last, now, self._steps[PLANNED].append)
        self._marks += 1
        if self._marks == CALIBRATION_STEPS:
            self._given_peak_bytes = self._peak_bytes()
        if self._marks == COLD_STEPS or (by_plan and not self._is_planned and self.is_calibrated):
            self._begin_watch()
        self._last, self._is_planned = now, by_plan and self.is_calibrated
        self._begin_count()

    def samples_ms(self, kind: str) -> list[float]:
        """Milliseconds of each step of a kind. Waits for the device."""
        self._clock.settle()
        return list(self._steps[kind])

    def stats(self) -> Stats:
        """The result so far. Waits for the device."""
        given, planned = self.samples_ms(GIVEN), self.samples_ms(PLANNED)
        given_ms, planned_ms = median(given), median(planned)
        planned_peak_bytes = self._peak_bytes() if planned else nan
        counts = [self._counts.get(kind) for kind in (GIVEN, PLANNED)]
        launches = [None if count is None else count.streams.kernels for count in counts]
        rates = [None if count is None else count.hit_rate for count in counts]
        stats = Stats(
            speedup=given_ms / planned_ms,
            memory_saved_mb=(self._given_peak_bytes - planned_peak_bytes) / MIB,
            given_ms=given_ms,
            planned_ms=planned_ms,
            given_steps=len(given),
            planned_steps=len(planned),
            given_peak_bytes=self._given_peak_bytes,
            planned_peak_bytes=planned_peak_bytes,
            given_launches=launches[0],
            planned_launches=launches[1],
            given_hit_rate=rates[0],
            planned_hit_rate=rates[1],
            overlap=overlap_of(self.streams),
        )
        reasons = self._reasons(len(given), len(planned))
        return replace(stats, missing={name: why for name, why in reasons.items() if is_missing(getattr(stats, name))})

    def get_metrics(self) -> dict[str, Any]:
        """Milliseconds of the newest steps by kind, the streams of the step that was counted, and what `stats` has.

        None for what was not measured, with the reason in `missing`.
        """
        samples = {kind: self.samples_ms(kind) for kind in self._steps}
        streams = None if self.streams is None else asdict(self.streams)
        return {"step_ms": samples, "streams": streams, **as_json(self.stats())}

    def close(self) -> None:
        """Nothing is counted any more."""
        if self._counting is not None:
            self._counting[1].drop()
            self._counting = None

    def _reasons(self, given: int, planned: int) -> dict[str, str]:
        """Why a field would be missing, for each that can be."""
        short = f"the loop ran {self._marks} steps; {CALIBRATION_STEPS} are needed"
        few = short if given < LEAST_STEPS else f"{planned} steps ran by the plan; {LEAST_STEPS} are needed"
        unplanned = self._why_unplanned() or few
        kinds = ((GIVEN, "given", short), (PLANNED, "planned", unplanned))
        reasons = {f"{name}_ms": why for _, name, why in kinds}
        for kind, name, why in kinds:
            uncounted = self._uncounted.get(kind, why)
            reasons[f"{name}_peak_bytes"] = why if self._is_gpu else NO_COUNT
            reasons[f"{name}_launches"] = uncounted if self._is_gpu else NO_LAUNCHES
            is_counted = kind in self._counts
            reasons[f"{name}_hit_rate"] = (NO_REQUEST if is_counted else uncounted) if self._is_gpu else NO_COUNT
            if kind == PLANNED:
                reasons["overlap"] = (ONE_STREAM if is_counted else uncounted) if self._is_gpu else NO_STREAMS
        return {"speedup": unplanned, "memory_saved_mb": unplanned if self._is_gpu else NO_COUNT, **reasons}

    def _begin_count(self) -> None:
        """One step of each kind, and none that is timed: the profiler makes it slower."""
        is_given = self._marks == CALIBRATION_STEPS - 1
        is_planned = self._is_planned and PLANNED not in self._counts and PLANNED not in self._uncounted
        if not self._is_gpu or not (is_given or is_planned):
            return
        kind = GIVEN if is_given else PLANNED
        try:
            self._counting = kind, StepCounter(self._device)
        except (CaptureError, *SURPRISES) as error:
            self._uncounted[kind] = first_line(error)

    def _end_count(self, *, by_plan: bool) -> bool:
        """Whether the step that ends was counted."""
        if self._counting is None:
            return False
        (kind, counter), self._counting = self._counting, None
        try:
            count = counter.end()
        except (CaptureError, *SURPRISES) as error:
            self._uncounted[kind] = first_line(error)
        else:
            if kind == GIVEN or by_plan:
                self._counts[kind] = count
        return True

    def _begin_watch(self) -> None:
        if self._gauge is not None:
            if self._watch is not None:
                self._gauge.end(self._watch)
            self._watch = self._gauge.begin()

    def _peak_bytes(self) -> float:
        """The most since the watch began, with what graphs keep for themselves; nan on a CPU."""
        if self._gauge is None or self._watch is None:
            return nan
        self._gauge.read()
        return self._watch.highest_bytes + graph_pool_bytes(self._device)


def overlap_of(streams: StreamProfile | None) -> float | None:
    """None where there is only one stream."""
    return None if streams is None or len(streams.streams) < 2 else streams.overlap_share


def median(samples: list[float]) -> float:
    """nan where there are too few."""
    return statistics.median(samples) if len(samples) >= LEAST_STEPS else nan
