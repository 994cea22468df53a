"""What was measured of a step's launches, kept for the next process that plans the same step on such a GPU.

What launches take is seen by torch.profiler, which leaves CUPTI behind: in the rest of such a process the host needs
longer for each launch. On an H200 a BERT-base took 40.6 ms a step before and 51.5 after (eager, bf16), by
`reduce-overhead` 7.4 and 8.2. So a training that finds all of it here is not slowed down, and plain torch is not where
a plan is compared with it. A race of plans takes 3 s, or the time of 500 steps: 12.5 s of a nanoGPT of 124 M parameters
on an H100.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.base.compile_cache import compiled_folder
from kitsune.base.file_cache import KeyedFiles
from kitsune.launches.model.recording import VALUES, Call, Place, Recording
from kitsune.launches.plans import Planned

#: One more with every change of the rules by which launches are timed and plans are made, timed or chosen: what was
#: measured before says nothing then.
RULES: Final = 2
FOLDER: Final = "kitsune-timings"
KNOWN: Final = "known"
#: Arguments whose text is the same in every process.
TOLD: Final = VALUES | {Place, torch.memory_format}


@dataclass(frozen=True, slots=True)
class TimingCache:
    """By `key_of` a recording."""

    files: KeyedFiles

    @classmethod
    def of_this_machine(cls) -> "TimingCache":
        """Beside what torch has compiled."""
        return cls(KeyedFiles(compiled_folder() / FOLDER))

    def costs_us(self, recording: Recording, measure: Callable[[Recording], list[float]]) -> list[float]:
        """What each launch takes alone; measured where that is not known. All processes come to the same numbers, and
        so to the same plans: of several that measure at the same time, those of the first one hold."""
        name, count = f"{key_of(recording)}.costs", len(recording.calls)
        found = self._costs_us(name, count)
        if found is not None:
            return found
        measured_us = measure(recording)
        text = " ".join(map(repr, measured_us))
        self.files.add(name, text)
        found = self._costs_us(name, count)
        if found is None:  # what is there says nothing
            self.files.write(name, text)
        return found or measured_us

    def are_kernels_known(self, recording: Recording) -> bool:
        """Whether the step was seen to launch what the recording does, and nothing else."""
        return self.files.read(f"{key_of(recording)}.kernels") == KNOWN

    def keep_kernels_known(self, recording: Recording) -> None:
        self.files.write(f"{key_of(recording)}.kernels", KNOWN)

    def winner(self, key: str, found: Sequence[Planned]) -> Planned | None:
        """The plan among these that won its race before."""
        name = self.files.read(f"{key}.winner")
        return next((plan for plan in found if plan.name == name), None)

    def keep_winner(self, key: str, plan: Planned) -> None:
        """A plan on one stream is not kept: a race that had no time or no memory for the others ends with it, too."""
        if plan.schedule.streams > 1:
            self.files.write(f"{key}.winner", plan.name)

    def _costs_us(self, name: str, count: int) -> list[float] | None:
        """None where nothing is kept, or what is there are no times of so many launches."""
        try:
            kept_us = list(map(float, (self.files.read(name) or "").split()))
        except ValueError:
            return None
        return kept_us if len(kept_us) == count and all(0 <= us < math.inf for us in kept_us) else None


def key_of(recording: Recording, *limits: int | None) -> str:
    """The same for the same launches on the same kind of GPU by the same torch, planned within the same limits.

    What they launch depends on the precision of fp32 products as well, which is a flag of torch's.
    """
    gpu = torch.cuda.get_device_name(recording.device) if recording.device.type == "cuda" else ""
    backends: Any = torch.backends
    precisions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    graph, calls = recording.graph, [in_words(call) for call in recording.calls]
    said = (RULES, torch.__version__, gpu, precisions, limits, graph.launches, graph.storages, calls)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def in_words(value: Any) -> str:
    """A call or an argument; what has no lasting text, a generator of the user's say, is told by its type."""
    if type(value) in TOLD:
        return repr(value)
    if isinstance(value, Call):
        return in_words((value.arguments, value.named, value.in_grad_mode))
    if isinstance(value, Mapping):
        return in_words(tuple(value.items()))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(in_words, value))})"
    return type(value).__qualname__
