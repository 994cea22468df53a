"""What kernels of ours were measured to be worth, kept for the next process that asks on such a GPU.

Measured anew in each, a match that is worth about as much as is asked for would fall on the other side now and then.
The step is another graph then, which Inductor compiles from the beginning: a ResNet-50 on an H200 took 34 to 78 s in
processes that should have found it compiled, and the plan was not the same in all of them.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton

from kitsune.base.compile_cache import compiled_folder
from kitsune.base.file_cache import KeyedFiles
from kitsune.fusion.cache_key import CODE_KEY, is_ours
from kitsune.fusion.stats import Benefit

FOLDER: Final = "kitsune-fusion"


@dataclass(frozen=True, slots=True)
class Benefits:
    """What a match was measured to take, as given and fused, by its key."""

    files: KeyedFiles

    @classmethod
    def of_this_machine(cls) -> "Benefits":
        """Beside what torch has compiled."""
        return cls(KeyedFiles(compiled_folder() / FOLDER))

    def find(self, key: str) -> Benefit | None:
        """None where nothing is kept, or what is there are no two times."""
        try:
            original_ms, fused_ms = map(float, (self.files.read(key) or "").split())
        except ValueError:
            return None
        are_times = all(0 < each < math.inf for each in (original_ms, fused_ms))
        return Benefit(original_ms, fused_ms) if are_times else None

    def keep(self, key: str, benefit: Benefit) -> Benefit:
        """The one that holds: of several processes that measured at the same time, the first one's."""
        text = f"{benefit.original_ms!r} {benefit.fused_ms!r}"
        self.files.add(key, text)
        found = self.find(key)
        if found is None:
            self.files.write(key, text)
        return found or benefit


def key_of(call: Callable[..., Any], said: tuple[Any, ...], device: torch.device) -> str | None:
    """The same for the same match, told by what is `said` of it, on the same kind of GPU by the same torch.

    None for a call that is not one of ours, whose code may be another one tomorrow, and where what is said holds an
    address.
    """
    if not is_ours(call):
        return None
    gpu = torch.cuda.get_device_name(device)
    text = repr((CODE_KEY, torch.__version__, triton.__version__, gpu, call.__module__, call.__qualname__, said))
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()
