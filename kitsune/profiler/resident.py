"""Resident memory of this process and its peak, from the Linux kernel. Linux only."""

import re
import resource
from pathlib import Path
from typing import Final

from kitsune.errors import UnfitError

STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
RESET_PEAK: Final = "5"  # proc(5): resets the peak of the resident set, since Linux 4.0


class Resident:
    """Resident bytes of this process, including Python and its libraries."""

    def now(self) -> int:
        """Raises UnfitError where the kernel does not report them."""
        now = _field("VmRSS")
        if now is None:
            raise UnfitError(f"{STATUS} does not show the memory of this process; memory is tracked on Linux only")
        return now

    def peak(self) -> int:
        """The peak since the process began, or since the last reset."""
        peak = _field("VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak

    def reset(self) -> bool:
        """Resets the peak to what is resident now. Returns False where the kernel does not allow it."""
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        except OSError:
            return False
        return _field("VmHWM") is not None


def _field(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
