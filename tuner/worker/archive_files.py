"""Writes an archive from the database to a file, from which the measuring processes load it. Does not import torch."""

from pathlib import Path

from kitsune.base.atomic_write import write_whole
from kitsune.base.digest import digest_of
from kitsune.base.environment import private_folder
from kitsune.errors import ArchiveError, UnfitError

FOLDER = "archives"


def archive_file(home: Path, sha256: str, content: bytes | None) -> Path:
    """Writes the archive to `home`/archives/SHA256.ksn, readable by this user only; returns the path.

    Atomically, because another worker may be reading or writing it.

    Raises ArchiveError when `content` is None or has another digest, and UnfitError when the file cannot be written.
    """
    if content is None:
        raise ArchiveError(f"the database no longer holds archive {sha256}; send it again and start a new run")
    if digest_of(content) != sha256:
        raise ArchiveError(f"the bytes that the database holds for archive {sha256} are damaged; send it again")
    folder = home / FOLDER
    try:
        path = private_folder(folder) / f"{sha256}.ksn"
        write_whole(path, content, new_mode=0o600)
    except OSError as error:
        raise UnfitError(
            f"{folder} cannot keep an archive of {len(content)} bytes ({error.strerror}); free or grant space there, "
            "or choose another folder with KITSUNE_HOME"
        ) from error
    return path
