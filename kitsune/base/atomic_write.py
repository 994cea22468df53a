"""Bytes in, a file that is whole out: whoever reads it finds the old content or the new one, never a part."""

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Writes `data` beside the file and puts it in its place; what was there stays when that fails.

    A link keeps pointing where it does: the file behind it is replaced, and keeps its mode. What cannot be replaced, a
    device or a file in a folder that is not ours to write, is written in place. Raises OSError.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises a RuntimeError for links in a circle
    mode = _mode(Path(path))
    if mode is not None and not (stat.S_ISREG(mode) and os.access(target.parent, os.W_OK)):
        Path(path).write_bytes(data)
        return
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        _put(draft, data, mode, target)
    except OSError as error:  # of the file that was asked for: the draft is nothing that anybody has named
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def _put(draft: Path, data: bytes, mode: int | None, target: Path) -> None:
    with draft.open("xb") as file:  # unlike tempfile, with the mode that a new file has here
        file.write(data)
    if mode is not None:
        draft.chmod(stat.S_IMODE(mode))
    draft.replace(target)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
