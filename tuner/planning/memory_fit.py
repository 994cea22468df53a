"""Peaks of memory of what a confirmation times in, which of its processes have room beside each other out. Pure; bytes.

By what ran out of memory on H100s and what did not: a Llama of 125 M, GPT-2 and a nanoGPT, four and two at a time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tuner.measuring.protocol import Inspection, Job
from tuner.records import Trial
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, STOCK

RESERVED: Final = 1.15  # what torch's allocator holds, over the peak of what is allocated
CONTEXT_BYTES: Final = 600_000_000  # CUDA and its libraries, a process
#: Peaks of the step as given that the long look takes, beside the candidate's; one more where dropout is looked at too.
LOOK: Final = 1.75


@dataclass(frozen=True, slots=True)
class Room:
    """`peak_bytes` of an arm by its name; infinite `memory_bytes` where memory is not counted, on a CPU."""

    memory_bytes: float
    peak_bytes: Mapping[str, int]
    look: float

    @classmethod
    def of(cls, inspection: Inspection, first: Trial, stock: Trial | None) -> "Room":
        is_counted = inspection.environment.device == "cuda"
        peaks = {EAGER: inspection.peak_bytes, STOCK: _peak_bytes(stock), CANDIDATE: _peak_bytes(first)}
        return cls(inspection.environment.memory_bytes if is_counted else math.inf, peaks, LOOK + inspection.random)

    def fits(self, job: Job, beside: Iterable[Job]) -> bool:
        return sum(map(self._bytes_of, (job, *beside))) <= self.memory_bytes

    def _bytes_of(self, job: Job) -> float:
        peaks = {arm.name: self.peak_bytes[arm.name] for arm in job.arms}
        times = self.look if job.kind == "prove" else 1.0
        return RESERVED * sum(peaks.values(), (times - 1.0) * peaks.get(EAGER, 0)) + CONTEXT_BYTES


def _peak_bytes(trial: Trial | None) -> int:
    return 0 if trial is None or trial.measurement is None else trial.measurement.arms[-1].peak_bytes
