"""The bytes of an archive in, a file of its own out, from which the measuring processes load it. No torch here."""

import hashlib
import os
import tempfile
from pathlib import Path

from kitsune.base.environment import private_folder
from kitsune.errors import ArchiveError, UnfitError

FOLDER = "archives"


def archive_file(home: Path, sha256: str, content: bytes | None) -> Path:
    """The archive in `home`/archives/SHA256.ksn, readable by this user alone, whole or not there at all.

    Raises ArchiveError when the bytes are missing or not those of this name, and UnfitError when the folder refuses.
    """
    if content is None:
        raise ArchiveError(f"the database no longer holds archive {sha256}; send it again and start a new run")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ArchiveError(f"the bytes that the database holds for archive {sha256} are not those; send it again")
    folder = home / FOLDER
    try:
        return _replaced(private_folder(folder) / f"{sha256}.ksn", content)
    except OSError as error:
        raise UnfitError(
            f"{folder} cannot keep an archive of {len(content)} bytes ({error.strerror}); free or grant space there, "
            "or choose another folder with KITSUNE_HOME"
        ) from error


def _replaced(path: Path, content: bytes) -> Path:
    """Another worker of this user may be reading the file, or writing the same one."""
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
