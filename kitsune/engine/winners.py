"""Which plan of a step's launches won its race, kept for the next process that plans the same step on such a GPU.

A race takes 3 s, or the time of 500 steps: of a nanoGPT of 124 M parameters on an H100 12 of the 18 s until its first
step was captured, in each of the processes that time it and in every training.
"""

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kitsune.compiled import compiled_folder
from kitsune.engine.planned import Planned
from kitsune.engine.recording import Recording
from kitsune.files import write_whole

log = logging.getLogger("kitsune")

FOLDER: Final = "kitsune-races"
MOST_BYTES: Final = 1000  # of a name; what is longer is not ours


@dataclass(frozen=True, slots=True)
class Winners:
    """Names of plans in the files of a folder, beside what torch has compiled. One that cannot be read or written costs
    a race, never the step."""

    folder: Path

    @classmethod
    def of_this_machine(cls) -> "Winners":
        return cls(compiled_folder() / FOLDER)

    def find(self, key: str, found: Sequence[Planned]) -> Planned | None:
        """The plan among these that won before."""
        with contextlib.suppress(OSError, UnicodeDecodeError), (self.folder / key).open("rb") as file:
            name = file.read(MOST_BYTES).decode()
            return next((plan for plan in found if plan.name == name), None)
        return None

    def keep(self, key: str, plan: Planned) -> None:
        """Whole or not at all, also when others write at the same time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / key, plan.name.encode())
        except OSError as error:
            log.info("which plan of the launches won is not kept in %s: %s", self.folder, error)


def key_of(recording: Recording, streams: int, pool_bytes: int | None) -> str:
    """The same for the same launches on the same kind of GPU by the same torch, planned on as many streams."""
    gpu = torch.cuda.get_device_name(recording.device) if recording.device.type == "cuda" else ""
    graph = recording.graph
    said = (torch.__version__, gpu, streams, pool_bytes, graph.launches, graph.storages)
    return hashlib.sha256(repr(said).encode()).hexdigest()
