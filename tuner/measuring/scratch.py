"""A folder for the temporary files of a measuring process, removed with it, and swept where its owner was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tuner.measuring import fault_injection

PREFIX: Final = "kitsune-"
OWNER: Final = "owner"  # in the folder: the file that the living process it belongs to keeps locked


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, which goes when the context ends."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        fault_injection.no_space("scratch-full", path)
        with _owned(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def scratch_beside(compiled: Path) -> Iterator[Path]:
    """A folder for temporary files. Inductor keeps precompiled C++ headers, 5 s of work, among them: those stay."""
    with scratch() as path:
        fault_injection.no_space("cache-full", compiled)
        compiled.mkdir(parents=True, exist_ok=True)
        (path / compiled.name).symlink_to(compiled.resolve(), target_is_directory=True)
        yield path


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Marks the folder as that of a living process.

    By a lock, which ends with the process however it ends: a number may be used again, and in another container it
    means another process. Under its name the file is locked from the first moment.
    """
    fresh = folder / f"{OWNER}.new"
    with fresh.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fresh.rename(folder / OWNER)
        yield


def sweep() -> None:
    """Removes what processes of this user have left that had no time to: the folders whose owner is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process sweeps too, or the folder is not ours
            _sweep(folder)


def _sweep(folder: Path) -> None:
    """Raises OSError when the folder is in use, or none of ours."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
