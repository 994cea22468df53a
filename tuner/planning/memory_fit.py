"""Decides which processes of a confirmation fit into GPU memory side by side, from the peaks of their arms, in bytes.

The constants come from runs on H100s that did and did not run out of memory: a Llama of 125 M parameters, GPT-2 and a
nanoGPT, with four and two processes at a time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tuner.measuring.protocol import Inspection, Job
from tuner.records import Trial
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, STOCK

RESERVED: Final = 1.15  # memory reserved by torch's allocator over the peak of allocated memory
CONTEXT_BYTES: Final = 600_000_000  # CUDA and its libraries, per process
#: Memory of the long numerics gate in peaks of the step as given, beside the candidate's peak; one more with dropout.
LOOK: Final = 1.75


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Memory of the device and `peak_bytes` by name of the arm. On a CPU, `memory_bytes` is infinite."""

    memory_bytes: float
    peak_bytes: Mapping[str, int]
    look: float

    @classmethod
    def of(cls, inspection: Inspection, first: Trial, stock: Trial | None) -> "MemoryFit":
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
