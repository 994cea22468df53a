"""What tests ask of other processes."""

import time
from pathlib import Path


def children() -> set[int]:
    """The processes that this one has started, by any of its threads."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def is_gone(process: int, within_s: float = 5.0) -> bool:
    """Whether the process has ended: it does not exist, or is a zombie that init has yet to collect."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False
