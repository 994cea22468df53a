"""Sizes of memory, as people write them."""

import math
import re
from numbers import Integral
from typing import Final

from kitsune.errors import SettingsError

SIZE: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:B|([KMGT])I?B)?", re.ASCII)
UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: The most that a database stores.
LARGEST: Final = 2**63 - 1


def parse_bytes(size: int | str, what: str = "memory_pool_size") -> int:
    """512, "512MB" or "2GiB" in bytes. Units are binary. Raises SettingsError, also for a part of a single byte."""
    if isinstance(size, Integral) and not isinstance(size, bool) and size >= 0:
        return int(size)
    said = SIZE.fullmatch(size.strip().upper()) if isinstance(size, str) else None
    if said is None:
        raise SettingsError(f"{what} is {size!r:.100}; use bytes or a string as '512MB' or '2GB'")
    number, unit = said.groups(default="")
    nbytes = float(number) * UNITS[unit]
    is_nothing = not number.strip("0.")
    if nbytes == math.inf or (nbytes < 1 and not is_nothing):
        raise SettingsError(f"{what} is {size!r:.100}; no memory has that size")
    return int(nbytes)


def parse_memory_limit(size: int | str | None) -> int | None:
    """The bytes of a memory limit, above 0; None stays None. Raises SettingsError."""
    if size is None:
        return None
    limit_bytes = parse_bytes(size, "memory_limit")
    if not 0 < limit_bytes <= LARGEST:
        raise SettingsError(f"memory_limit is {size!r:.100}; use the memory that a step may need, as 40GiB")
    return limit_bytes


def size_words(count: int) -> str:
    """ "40 GiB", "5.21 GiB" or "512 MiB"."""
    unit, name = ("G", "GiB") if count >= UNITS["G"] else ("M", "MiB")
    return f"{count / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {name}"
