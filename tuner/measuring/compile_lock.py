"""A lock per compiled code: one child of a run compiles it, and the others then find it in torch's caches.

Two processes that compile the same code at the same time both do all the work (H100, BERT-base in plain compile: 110 s
a trial, but 24 s where another process had compiled the same). Different codes are compiled in parallel, though they
share most of their Triton kernels: waiting for those as well made the second trial take 153 s instead of 113 s.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kitsune.base.digest import digest_of
from kitsune.knobs import KNOBS, Choice, is_compiled
from tuner.records import Phase


@dataclass(slots=True)
class Compilations:
    """The locks of one run, in a folder that its children share. `queued_s`: seconds waited for others, by phase."""

    folder: Path
    phase: Callable[[], Phase]
    queued_s: dict[Phase, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def turn(self, code: str) -> Iterator[None]:
        """Holds the lock of `code` while the block compiles it; does not wait where it has been compiled before.

        If the block raises, or its process dies, the next process gets the lock and compiles.
        """
        made = self.folder / f"{code}.compiled"
        if made.exists():
            yield
            return
        with made.with_suffix(".lock").open("wb") as file:
            self._lock(file)
            if made.exists():
                fcntl.flock(file, fcntl.LOCK_UN)
            yield
            made.touch()

    def is_due(self, code: str) -> bool:
        made = self.folder / f"{code}.compiled"
        if made.exists():
            return False
        with made.with_suffix(".lock").open("wb") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _lock(self, file: IO[bytes]) -> None:
        began = time.monotonic()
        fcntl.flock(file, fcntl.LOCK_EX)
        phase = self.phase()
        self.queued_s[phase] = self.queued_s.get(phase, 0.0) + time.monotonic() - began


_active: Compilations | None = None


@contextlib.contextmanager
def sharing(folder: str | None, phase: Callable[[], Phase]) -> Iterator[Mapping[Phase, float]]:
    """Inside the block, this process takes turns compiling with the others of the folder; without a folder, no locks.

    Yields the seconds that each phase has waited so far.
    """
    global _active  # noqa: PLW0603 - of the process, as a measuring process has one job
    _active = None if folder is None else Compilations(Path(folder), phase)
    try:
        yield {} if _active is None else _active.queued_s
    finally:
        _active = None


def turn_for(knobs: Mapping[str, Choice], *, randomness: bool) -> contextlib.AbstractContextManager[None]:
    """The lock to hold during the first step with these choices, with or without random numbers."""
    code = code_of(knobs, randomness=randomness)
    return contextlib.nullcontext() if _active is None or code is None else _active.turn(code)


def is_due(knobs: Mapping[str, Choice], *, randomness: bool) -> bool:
    """Whether no process has compiled this code or is compiling it. Not atomic: two callers may both get True."""
    code = code_of(knobs, randomness=randomness)
    return _active is not None and code is not None and _active.is_due(code)


def code_of(knobs: Mapping[str, Choice], *, randomness: bool) -> str | None:
    """A hash of the choices that change the compiled code; None where nothing is compiled."""
    if not is_compiled(knobs):
        return None
    items = sorted((knob, choice) for knob, choice in knobs.items() if knob not in KNOBS or KNOBS[knob].changes_code)
    return digest_of(repr((items, randomness)))[:16]
