"""Temporary folders of measuring processes. `sweep` removes those whose owner was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tuner import fault_injection

PREFIX: Final = "kitsune-"
OWNER: Final = "owner"  # file in the folder that its owner process keeps locked


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, removed at the end of the block."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        fault_injection.no_space("scratch-full", path)
        with _owned(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def scratch_beside(compiled: Path) -> Iterator[Path]:
    """A folder for temporary files, with a link to the compile cache. Inductor writes precompiled C++ headers, 5 s of
    work, into the temporary folder; by the link they are kept."""
    with scratch() as path:
        fault_injection.no_space("cache-full", compiled)
        compiled.mkdir(parents=True, exist_ok=True)
        (path / compiled.name).symlink_to(compiled.resolve(), target_is_directory=True)
        yield path


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Marks the folder as that of a living process, by a lock on the owner file.

    A lock is released however the process ends. A PID would not do: it can be reused, and in another container it means
    another process. The file is locked before it gets its final name.
    """
    fresh = folder / f"{OWNER}.new"
    with fresh.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fresh.rename(folder / OWNER)
        yield


def sweep() -> None:
    """Removes folders of this user whose owner process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process sweeps too, or the folder is not ours
            _sweep(folder)


def _sweep(folder: Path) -> None:
    """Raises OSError when the folder is in use, or is not one of ours."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
