"""Sizes of memory, as people write them."""

import math
import re
from numbers import Integral
from typing import Final

from kitsune.errors import SettingsError

SIZE: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMG]?B)?", re.ASCII)
UNITS: Final = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def parse_bytes(size: int | str) -> int:
    """512, '512MB' or '2GB' (binary units) in bytes. Raises SettingsError, also for a part of a single byte."""
    if isinstance(size, Integral) and not isinstance(size, bool) and size >= 0:
        return int(size)
    said = SIZE.fullmatch(size.strip().upper()) if isinstance(size, str) else None
    if said is None:
        raise SettingsError(f"memory_pool_size is {size!r:.100}; use bytes or a string as '512MB' or '2GB'")
    number, unit = said.groups(default="")
    nbytes = float(number) * UNITS[unit]
    is_nothing = not number.strip("0.")
    if nbytes == math.inf or (nbytes < 1 and not is_nothing):
        raise SettingsError(f"memory_pool_size is {size!r:.100}; no memory has that size")
    return int(nbytes)
