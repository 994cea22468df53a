"""Writes an archive from the database to a file, from which the measuring processes load it. Does not import torch."""

import os
import tempfile
from pathlib import Path

from kitsune.base.digest import digest_of
from kitsune.base.environment import private_folder
from kitsune.errors import ArchiveError, UnfitError

FOLDER = "archives"


def archive_file(home: Path, sha256: str, content: bytes | None) -> Path:
    """Writes the archive atomically to `home`/archives/SHA256.ksn, readable by this user only; returns the path.

    Raises ArchiveError when `content` is None or has another digest, and UnfitError when the file cannot be written.
    """
    if content is None:
        raise ArchiveError(f"the database no longer holds archive {sha256}; send it again and start a new run")
    if digest_of(content) != sha256:
        raise ArchiveError(f"the bytes that the database holds for archive {sha256} are damaged; send it again")
    folder = home / FOLDER
    try:
        return _replaced(private_folder(folder) / f"{sha256}.ksn", content)
    except OSError as error:
        raise UnfitError(
            f"{folder} cannot keep an archive of {len(content)} bytes ({error.strerror}); free or grant space there, "
            "or choose another folder with KITSUNE_HOME"
        ) from error


def _replaced(path: Path, content: bytes) -> Path:
    """Replaces the file atomically, because another worker may be reading or writing it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:16]}-")  # mkstemp: mode 0600
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return path
