"""Fault injection by KITSUNE_FAULTS, for tests and for operators who want to see how their installation reacts.

    KITSUNE_FAULTS="scratch-full@2, child-kill=timing@3, clock-ahead=3600, database-full@5+"

NAME[=VALUE][@N[+]]: the fault occurs the N-th time that this process reaches its injection point (default: the first),
and with `+` every time after that. Each occurrence is logged.
"""

import errno
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import Field

from kitsune.base.base_record import Record
from kitsune.base.environment import PREFIX
from kitsune.errors import SettingsError

#: Name of a fault -> what its value means; "" where it takes none.
KINDS: Final[Mapping[str, str]] = {
    "scratch-full": "",  #: the folder of a measuring process cannot be made: no space
    "cache-full": "",  #: the folder of compiled code cannot be made: no space
    "child-kill": "phase",  #: a measuring process is killed as it enters the phase
    "child-stop": "phase",  #: it is stopped as it enters the phase, so it hangs
    "gpu-lost": "",  #: the answer of a measuring process is a sticky CUDA error
    "gpu-sick": "",  #: the self-test of the GPU fails
    "worker-kill": "event",  #: this process kills itself on it (trying, tried, confirming...)
    "heart-stop": "",  #: a heartbeat is not sent
    "database-full": "",  #: a transaction that writes fails: no space
    "database-away": "",  #: a transaction fails: no connection
    "clock-ahead": "seconds",  #: the wall clock jumps ahead, and stays there
}
#: These last from their first occurrence on, with or without `+`.
LASTING: Final = frozenset({"clock-ahead"})
_SPELLED: Final = re.compile(r"(?P<name>[a-z-]+)(=(?P<value>[^@]+))?(@(?P<first>[1-9][0-9]*)(?P<lasting>\+)?)?")

log = logging.getLogger("kitsune")


class Fault(Record):
    """One fault. It occurs the `first`-th time that its injection point is reached, and if lasting ever after."""

    name: str
    value: str = ""
    first: int = Field(default=1, ge=1)
    is_lasting: bool = False

    def strikes(self, times: int) -> bool:
        return times == self.first or (self.is_lasting and times > self.first)


def parsed(text: str) -> tuple[Fault, ...]:
    """The faults of a KITSUNE_FAULTS value. Raises SettingsError for invalid syntax or an unknown name."""
    return tuple(_fault(part.strip()) for part in text.split(",") if part.strip())


def _fault(text: str) -> Fault:
    found = _SPELLED.fullmatch(text)
    if found is None or found["name"] not in KINDS:
        raise SettingsError(
            f"{PREFIX}FAULTS holds {text!r:.100}; a fault is NAME[=VALUE][@N[+]], and NAME one of {', '.join(KINDS)}"
        )
    name, value = found["name"], (found["value"] or "").strip()
    if bool(value) != bool(KINDS[name]):
        way_out = f"write {name}={KINDS[name].upper()}" if KINDS[name] else f"{name} takes no value"
        raise SettingsError(f"{PREFIX}FAULTS holds {text!r:.100}; {way_out}")
    if KINDS[name] == "seconds" and not re.fullmatch(r"-?\d+(\.\d+)?", value):
        raise SettingsError(f"{PREFIX}FAULTS holds {text!r:.100}; {value!r} is no number of seconds")
    return Fault(
        name=name, value=value, first=int(found["first"] or 1), is_lasting=bool(found["lasting"]) or name in LASTING
    )


class Planted:
    """The active faults, and how often each one's injection point was reached so far. Thread-safe."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._times = [0] * len(self._faults)
        self._lock = threading.Lock()

    def struck(self, name: str, value: str | None) -> Fault | None:
        """Counts this call; returns the fault that occurs here, or None."""
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.name == name and value in (None, fault.value):
                    self._times[index] += 1
                    if fault.strikes(self._times[index]):
                        self._tell(fault, self._times[index])
                        return fault
        return None

    def _tell(self, fault: Fault, times: int) -> None:
        if times == fault.first or fault.name not in LASTING:
            value = f"={fault.value}" if fault.value else ""
            log.warning("planted fault %s%s strikes, at the %d. time", fault.name, value, times)


_planted: Planted | None = None


def plant(faults: Sequence[Fault]) -> None:
    """Replaces the faults of this process; an empty sequence removes them."""
    global _planted  # noqa: PLW0603 - one process, one set of faults
    _planted = Planted(faults) if faults else None


def struck(name: str, value: str | None = None) -> Fault | None:
    """The injection point: the fault if it occurs now, else None. `value` tells points of the same name apart."""
    return None if _planted is None else _planted.struck(name, value)


def no_space(name: str, path: str | os.PathLike[str]) -> None:
    """Raises OSError (ENOSPC) for the path if the fault occurs now."""
    if struck(name):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))


def seconds(name: str) -> float:
    """The value of the fault if it occurs now, else 0."""
    fault = struck(name)
    return float(fault.value) if fault else 0.0
