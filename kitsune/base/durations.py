"""Parses durations such as "90s" or "5m"."""

import math
import re
from typing import Final

from kitsune.errors import SettingsError

UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SPELLING = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", re.ASCII)


def seconds_of(length: str | float, what: str) -> float:
    """Seconds of 300, "300", "90s", "5m", "1h" or "30d". Raises SettingsError naming `what` unless it is above 0."""
    match = _SPELLING.fullmatch(str(length))
    seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise SettingsError(f"{what} is {length!r:.100}; use seconds or a time as 90s, 5m, 1h or 30d")
    return seconds
