"""StepProfile: how long the steps of a user's loop took as given, and how long they take by the plan.

A step is what lies between two updates: the loop's own work on batches is in it, as it is in the time that the user
waits. Nothing waits for the device before somebody asks.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any, Final

import torch

from kitsune.device import graph_pool_bytes
from kitsune.profiler.clock import Clock, Mark
from kitsune.profiler.gauge import Gauge, Watch, gauge_of

CALIBRATION_STEPS: Final = 14  # as given, before the plan is applied; COLD_STEPS of them set up libraries
COLD_STEPS: Final = 4
LEAST_STEPS: Final = 5
KEPT_STEPS: Final = 500  # of each kind, the newest
GIVEN, PLANNED = "as given", "by the plan"
MIB: Final = 2**20
NO_COUNT: Final = "torch does not count memory on a CPU"


@dataclass(frozen=True, slots=True)
class Stats:
    """What the plan came to on this run. A number that was not measured is nan, with the reason in `missing`.

    `given_ms` and `planned_ms` are medians of the steps as given and by the plan, `speedup` their ratio. Peaks are
    bytes in tensors, with what graphs keep for themselves; `memory_saved_mb` is in MiB, and negative where the plan
    needs more.
    """

    speedup: float
    memory_saved_mb: float
    given_ms: float
    planned_ms: float
    given_steps: int
    planned_steps: int
    given_peak_bytes: float
    planned_peak_bytes: float
    missing: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"step as given  {shown(self.given_ms, 'ms')} (median of {self.given_steps})",
            f"step by plan   {shown(self.planned_ms, 'ms')} (median of {self.planned_steps})",
            f"speedup        {shown(self.speedup, 'x')}",
            f"memory saved   {shown(self.memory_saved_mb, 'MiB')}",
        ]
        return "\n".join([*lines, *(f"{name} was not measured: {reason}" for name, reason in self.missing.items())])


def unmeasured(reason: str) -> Stats:
    """Stats of a run on which nothing was measured."""
    return Stats(nan, nan, nan, nan, 0, 0, nan, nan, {"given_ms": reason, "planned_ms": reason})


def shown(value: float, unit: str) -> str:
    return "-" if value != value else f"{value:.4g} {unit}"


class StepProfile:
    """Call `mark` after every update. Until `is_calibrated` nothing of the plan may have been applied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = 0
        self._clock = Clock(device)
        self._last: Mark | None = None
        # Bytes in tensors: a process holds more than that, and a CPU's cannot be told apart.
        self._gauge: Gauge | None = gauge_of(device) if device.type == "cuda" else None
        self._watch: Watch | None = None
        self._steps = {kind: deque[float](maxlen=KEPT_STEPS) for kind in (GIVEN, PLANNED)}
        self._given_peak_bytes = nan
        self._is_planned = False

    @property
    def is_calibrated(self) -> bool:
        return self._marks >= CALIBRATION_STEPS

    def mark(self, *, by_plan: bool) -> None:
        """The end of a step; `by_plan`: all of the next one is expected to run by the plan."""
        now = self._clock.mark()
        if self._last is not None:
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

    def samples_ms(self, kind: str) -> list[float]:
        """Milliseconds of each step of a kind. Waits for the device."""
        self._clock.settle()
        return list(self._steps[kind])

    def stats(self, why_unplanned: str) -> Stats:
        """`why_unplanned` is the reason if no step ran by the plan. Waits for the device."""
        given, planned = self.samples_ms(GIVEN), self.samples_ms(PLANNED)
        given_ms, planned_ms = median(given), median(planned)
        planned_peak_bytes = self._peak_bytes() if planned else nan
        missing = {}
        if len(given) < LEAST_STEPS:
            missing["given_ms"] = f"the loop ran {self._marks} steps; {CALIBRATION_STEPS} are needed"
        if len(planned) < LEAST_STEPS:
            missing["planned_ms"] = why_unplanned or f"{len(planned)} steps ran by the plan; {LEAST_STEPS} are needed"
        saved_mb = (self._given_peak_bytes - planned_peak_bytes) / MIB
        if saved_mb != saved_mb:
            missing["memory_saved_mb"] = NO_COUNT if self._device.type != "cuda" else next(iter(missing.values()))
        return Stats(
            speedup=given_ms / planned_ms,
            memory_saved_mb=saved_mb,
            given_ms=given_ms,
            planned_ms=planned_ms,
            given_steps=len(given),
            planned_steps=len(planned),
            given_peak_bytes=self._given_peak_bytes,
            planned_peak_bytes=planned_peak_bytes,
            missing=missing,
        )

    def get_metrics(self) -> dict[str, Any]:
        """Milliseconds of the newest steps, by kind, and what follows from them; null for what was not measured."""
        samples = {kind: self.samples_ms(kind) for kind in self._steps}
        return {"step_ms": samples, **as_json(self.stats(""))}

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


def median(samples: list[float]) -> float:
    """nan where there are too few."""
    return statistics.median(samples) if len(samples) >= LEAST_STEPS else nan


def as_json(stats: Stats) -> dict[str, Any]:
    """For a file: null for what was not measured."""
    return {name: None if value != value else value for name, value in asdict(stats).items()}
