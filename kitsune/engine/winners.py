"""Which plan of a step's launches won its race, kept for the next process that plans the same step on such a GPU.

A race takes 3 s, or the time of 500 steps: 12.5 s of a nanoGPT of 124 M parameters on an H100, in each of the
processes that time it and at every start of a training.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.compile_cache import compiled_folder
from kitsune.engine.planned import Planned
from kitsune.engine.recording import VALUES, Call, Place, Recording
from kitsune.keyed_files import KeyedFiles

#: One more with every change of the rules by which plans are made, timed or chosen: an old winner says nothing then.
RULES: Final = 1
FOLDER: Final = "kitsune-races"
#: Arguments whose text is the same in every process.
TOLD: Final = VALUES | {Place, torch.memory_format}


@dataclass(frozen=True, slots=True)
class Winners:
    """Names of plans."""

    files: KeyedFiles

    @classmethod
    def of_this_machine(cls) -> "Winners":
        """Beside what torch has compiled."""
        return cls(KeyedFiles(compiled_folder() / FOLDER))

    def find(self, key: str, found: Sequence[Planned]) -> Planned | None:
        """The plan among these that won before."""
        name = self.files.read(key)
        return next((plan for plan in found if plan.name == name), None)

    def keep(self, key: str, plan: Planned) -> None:
        """A plan on one stream is not kept: a race that had no time or no memory for the others ends with it, too."""
        if plan.schedule.streams > 1:
            self.files.write(key, plan.name)


def key_of(recording: Recording, streams: int, pool_bytes: int | None) -> str:
    """The same for the same launches on the same kind of GPU by the same torch, planned on as many streams.

    What they launch depends on the precision of fp32 products as well, which is a flag of torch's.
    """
    gpu = torch.cuda.get_device_name(recording.device) if recording.device.type == "cuda" else ""
    backends: Any = torch.backends
    precisions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    graph, calls = recording.graph, [in_words(call) for call in recording.calls]
    said = (RULES, torch.__version__, gpu, precisions, streams, pool_bytes, graph.launches, graph.storages, calls)
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
