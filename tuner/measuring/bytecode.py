"""A bytecode cache for measuring processes where the installed packages have none. Does not import torch.

In images built with PYTHONDONTWRITEBYTECODE=1, and in read-only ones, every process (also Inductor's workers) compiles
the 1,500 modules of torch again. On an H200, under a profiler and with Inductor's cache warm, that took 8 of the 32 s
until the step of a BERT-base was captured.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PACKAGE: Final = "torch"
FOLDER: Final = "kitsune-bytecode"
#: Confined processes have a folder of their own, so that scripts do not read what they wrote. This is no security
#: boundary: a process can write whatever its user can write (decision 0014), including torch's compile cache.
CONFINED: Final = "kitsune-bytecode-confined"
MIN_FREE_BYTES: Final = 2**30  # of disk space; the bytecode of torch and its dependencies takes 0.1 GB


def bytecode_variables(compiled: Path, *, is_confined: bool) -> Mapping[str, str]:
    """Environment variables that make a process read and write bytecode in a folder in torch's compile cache.

    Empty where the packages come with bytecode, where Python can write it beside them, where the user has set
    PYTHONPYCACHEPREFIX, or where disk space is short.
    """
    if sys.pycache_prefix is not None or not lacks_bytecode(module_of(PACKAGE)) or not has_space(compiled):
        return {}
    folder = compiled / (CONFINED if is_confined else FOLDER)
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def module_of(package: str) -> Path | None:
    """The first file of the package, found without importing it."""
    found = importlib.util.find_spec(package)
    return Path(found.origin) if found is not None and found.origin is not None else None


def lacks_bytecode(module: Path | None) -> bool:
    """Whether every process would have to compile this module again."""
    if module is None or Path(importlib.util.cache_from_source(module)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(module.parent, os.W_OK)


def has_space(folder: Path) -> bool:
    """Whether the disk of the folder has space for bytecode. The folder need not exist yet."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free > MIN_FREE_BYTES
