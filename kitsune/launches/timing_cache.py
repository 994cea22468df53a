"""Timings, kernel checks and race winners on disk, for later processes that plan the same step on the same kind of GPU.

It saves time, and it keeps the process fast. Launches are timed with torch.profiler, which leaves CUPTI active: from
then on the host needs longer for each launch. On an H200 a step of BERT-base took 40.6 ms before and 51.5 ms after
(eager, bf16), and with `reduce-overhead` 7.4 and 8.2. A process that finds everything here never starts the profiler,
so neither training nor plain torch, when a plan is compared with it, is slowed down. A race takes 3 s, or the time of
500 steps: 12.5 s for a nanoGPT of 124 M parameters on an H100. See docs/decisions/0091-launches-are-timed-once.md.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.base.compile_cache import compiled_folder
from kitsune.base.file_cache import KeyedFiles
from kitsune.launches.model.recording import VALUES, Call, Recording, TensorView
from kitsune.launches.plans import Planned

#: Version of the cache. Add one with every change to how launches are timed or plans are made, timed or chosen: older
#: entries are invalid then.
RULES: Final = 2
FOLDER: Final = "kitsune-timings"
KNOWN: Final = "known"
#: Types of arguments whose `repr` is the same in every process.
STABLE_TYPES: Final = VALUES | {TensorView, torch.memory_format}


@dataclass(frozen=True, slots=True)
class TimingCache:
    """What was measured of a step, by the `key_of` its recording."""

    files: KeyedFiles

    @classmethod
    def of_this_machine(cls) -> "TimingCache":
        """The cache in the folder of torch's compile caches."""
        return cls(KeyedFiles(compiled_folder() / FOLDER))

    def costs_us(self, recording: Recording, measure: Callable[[Recording], list[float]]) -> list[float]:
        """The time of each launch alone in us, from the cache or from `measure`.

        If several processes measure at the same time, all use the times of the first, and so make the same plans.
        """
        name, count = f"{key_of(recording)}.costs", len(recording.calls)
        found = self._costs_us(name, count)
        if found is not None:
            return found
        measured_us = measure(recording)
        text = " ".join(map(repr, measured_us))
        self.files.add(name, text)
        found = self._costs_us(name, count)
        if found is None:  # the entry is invalid
            self.files.write(name, text)
        return found or measured_us

    def are_kernels_known(self, recording: Recording) -> bool:
        """Whether an earlier process saw that the step launches the kernels of its recording, and no others."""
        return self.files.read(f"{key_of(recording)}.kernels") == KNOWN

    def keep_kernels_known(self, recording: Recording) -> None:
        self.files.write(f"{key_of(recording)}.kernels", KNOWN)

    def winner(self, key: str, found: Sequence[Planned]) -> Planned | None:
        """The plan among these that won the race of an earlier process, or None."""
        name = self.files.read(f"{key}.winner")
        return next((plan for plan in found if plan.name == name), None)

    def keep_winner(self, key: str, plan: Planned) -> None:
        """Stores the winner. One stream is not stored: it also wins a race that had no time or memory for others."""
        if plan.schedule.streams > 1:
            self.files.write(f"{key}.winner", plan.name)

    def _costs_us(self, name: str, count: int) -> list[float] | None:
        """None if there is no entry, or an invalid one: it must be `count` finite numbers, none negative."""
        try:
            kept_us = list(map(float, (self.files.read(name) or "").split()))
        except ValueError:
            return None
        return kept_us if len(kept_us) == count and all(0 <= us < math.inf for us in kept_us) else None


def key_of(recording: Recording, *limits: int | None) -> str:
    """Cache key of a recording: a hash of its launches, the kind of GPU, torch's version, and the limits of the plan.

    It includes torch's flags on which the choice of kernels depends: the precision of fp32 products, and how cuDNN
    picks its algorithms.
    """
    gpu = torch.cuda.get_device_name(recording.device) if recording.device.type == "cuda" else ""
    backends: Any = torch.backends
    precisions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    algorithms = backends.cudnn.benchmark, backends.cudnn.deterministic
    graph, calls = recording.graph, [stable_text(call) for call in recording.calls]
    said = (RULES, torch.__version__, gpu, precisions, algorithms, limits, graph.launches, graph.storages, calls)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def stable_text(value: Any) -> str:
    """A call or an argument as text that is the same in every process.

    For a value without such text, such as a generator of the user's, the name of its type.
    """
    if type(value) in STABLE_TYPES:
        return repr(value)
    if isinstance(value, Call):
        return stable_text((value.arguments, value.named, value.in_grad_mode))
    if isinstance(value, Mapping):
        return stable_text(tuple(value.items()))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(stable_text, value))})"
    return type(value).__qualname__
