"""Writes files. Atomically: a reader sees the old content or the new one, never a part."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from kitsune.errors import SettingsError


def write_whole(path: str | Path, data: bytes, *, new_mode: int | None = None) -> None:
    """Writes `data` to a temporary file beside the target and renames it; when that fails, the old content stays.

    A symbolic link is kept: the file that it points to is replaced, with the same mode. A target that cannot be
    replaced, as a device or a file in a read-only folder, is written in place. `new_mode`: mode of a file that does
    not exist yet, in place of the usual one. Raises OSError.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises a RuntimeError for a cycle of links
    mode = _mode(Path(path))
    if mode is not None and not (stat.S_ISREG(mode) and os.access(target.parent, os.W_OK)):
        Path(path).write_bytes(data)
        return
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        _put(draft, data, new_mode if mode is None else stat.S_IMODE(mode), target)
    except OSError as error:  # naming the path that the caller gave, not the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(target: str, note: str = "") -> Iterator[None]:
    """Turns an OSError into a SettingsError that says which `target` cannot be written, and why; `note` follows."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{target} cannot be written: {error.strerror}{note}") from error


def _put(draft: Path, data: bytes, mode: int | None, target: Path) -> None:
    with draft.open("xb") as file:  # unlike tempfile, with the default mode of new files
        if mode is not None:
            draft.chmod(mode)
        file.write(data)
    draft.replace(target)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
