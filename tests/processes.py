"""What tests ask of other processes."""

import contextlib
import time
from pathlib import Path


def children(process: int | str = "self") -> set[int]:
    """The processes that this one, or another, has started, by any of its threads; none when there is no such process.

    When a thread ends in the middle, its children become another's, which may have been asked already: asked anew.
    """
    while True:
        try:
            tasks = list(Path(f"/proc/{process}/task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return set()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def measuring(process: int | str = "self") -> set[int]:
    """Those of them that measure; one that is forked but not yet itself is left out: to stop it would stop us."""
    return {child for child in children(process) if b"tuner.child.main" in command_line(child)}


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def state(process: int) -> str | None:
    """One letter, as ps shows it: R, S, T (stopped), Z (ended, not yet collected); None when there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_gone(process: int, within_s: float = 20.0) -> bool:
    """Whether the process has ended: it does not exist, or is a zombie that init has yet to collect."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if state(process) in (None, "Z", "X"):
            return True
        time.sleep(0.05)
    return False
