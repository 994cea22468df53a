"""Python's bytecode for measuring processes, where the installed packages have none and will get none. No torch here.

Images made with PYTHONDONTWRITEBYTECODE=1, and read-only ones, compile the 1,500 modules of torch anew in each process,
Inductor's workers too. On an H200, under a profiler, 8 of the 32 s until the step of a BERT-base was captured went to
that, with all that Inductor compiles in its cache.
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
#: Of confined processes, so that what they write is not read by scripts by the way. It is no barrier: a process writes
#: what its user may write (decision 0014), torch's compile cache too.
CONFINED: Final = "kitsune-bytecode-confined"
ROOM_BYTES: Final = 2**30  # free, for the bytecode of torch and what it loads to be worth its 0.1 GB


def bytecode_variables(compiled: Path, *, is_confined: bool) -> Mapping[str, str]:
    """Variables by which a process finds bytecode beside torch's compile cache, and writes what is missing there.

    Empty where the packages come with theirs, where Python may still write it beside them, where the user has named a
    place, or where the disk has little room.
    """
    if sys.pycache_prefix is not None or not lacks_bytecode(module_of(PACKAGE)) or not has_room(compiled):
        return {}
    folder = compiled / (CONFINED if is_confined else FOLDER)
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def module_of(package: str) -> Path | None:
    """Its first file, without loading it."""
    found = importlib.util.find_spec(package)
    return Path(found.origin) if found is not None and found.origin is not None else None


def lacks_bytecode(module: Path | None) -> bool:
    """Whether each process would compile this module anew."""
    if module is None or Path(importlib.util.cache_from_source(module)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(module.parent, os.W_OK)


def has_room(folder: Path) -> bool:
    """Whether the disk of the folder, which need not be there yet, has room for bytecode."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free > ROOM_BYTES
