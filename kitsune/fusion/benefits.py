"""Caches measured benefits on disk, for the next process on the same kind of GPU.

If each process measured again, a match close to the required benefit would sometimes be replaced and sometimes not. The
graph then differs, and Inductor compiles it from scratch: a ResNet-50 on an H200 took 34 to 78 s in processes that
should have found it in the cache, and the fused step differed between processes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton

from kitsune.base.compile_cache import compiled_folder
from kitsune.base.digest import digest_of
from kitsune.base.file_cache import KeyedFiles
from kitsune.fusion.cache_key import CODE_KEY, is_ours
from kitsune.fusion.stats import Benefit

FOLDER: Final = "kitsune-fusion"


@dataclass(frozen=True, slots=True)
class Benefits:
    """The cached times of matches, unmodified and fused, by key."""

    files: KeyedFiles

    @classmethod
    def of_this_machine(cls) -> "Benefits":
        """The cache of this machine, in torch's folder for compiled code."""
        return cls(KeyedFiles(compiled_folder() / FOLDER))

    def find(self, key: str) -> Benefit | None:
        """The cached benefit; None when there is none, or the entry is invalid."""
        try:
            original_ms, fused_ms = map(float, (self.files.read(key) or "").split())
        except ValueError:
            return None
        are_times = all(0 < each < math.inf for each in (original_ms, fused_ms))
        return Benefit(original_ms, fused_ms) if are_times else None

    def keep(self, key: str, benefit: Benefit) -> Benefit:
        """Stores a benefit and returns the one to use: of concurrent processes, that of the first."""
        text = f"{benefit.original_ms!r} {benefit.fused_ms!r}"
        self.files.add(key, text)
        found = self.find(key)
        if found is None:
            self.files.write(key, text)
        return found or benefit


def key_of(call: Callable[..., Any], said: tuple[Any, ...], device: torch.device) -> str | None:
    """The cache key of a match: its call, its signature `said`, the model of the GPU, and versions of the software.

    None for a call that is not Kitsune's, whose code may change, and when the signature contains a memory address.
    """
    if not is_ours(call):
        return None
    gpu = torch.cuda.get_device_name(device)
    text = repr((CODE_KEY, torch.__version__, triton.__version__, gpu, call.__module__, call.__qualname__, said))
    return None if " at 0x" in text else digest_of(text)
