"""Handles Ctrl-C during a run: counts interrupts, so that the run can end at a safe point instead of being aborted."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Final

from kitsune.cli import signals
from tuner.tuning.events import Ablating, Confirming, Event, Explaining, PlayingOff, Tried, Trying

AFRESH: Final = "Stopping: the best so far is measured afresh. Ctrl-C once more stops at once."
NOTHING: Final = "Stopping: nothing was measured yet."
STAYS: Final = "Stopping: the plan stays as it was measured."
#: The message for the first Ctrl-C, by the type of the last event.
_WORDS: Final[Mapping[type[Event], str]] = {
    PlayingOff: AFRESH,
    Confirming: AFRESH,
    Explaining: STAYS,
    Ablating: STAYS,
}


def no_interrupts() -> int:
    return 0


class Interrupts:
    """Counts Ctrl-C. The first one raises nothing while a run is under way, because an exception between two trials
    would lose results. Before the run has started, and from the second one on, it raises KeyboardInterrupt.
    """

    def __init__(self, tell: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self.count = 0
        self._tell = tell
        self._say = say
        self._is_under_way = False
        self._has_measured = False
        self._words = ""

    def tell(self, event: Event) -> None:
        """Passes the event on, and picks the message that a Ctrl-C after it would show."""
        self._is_under_way = True
        self._has_measured |= isinstance(event, Tried) and event.trial.measurement is not None
        if isinstance(event, Trying) or self._words == NOTHING:
            self._words = AFRESH if self._has_measured else NOTHING
        self._words = _WORDS.get(type(event), self._words)
        self._tell(event)

    def counted(self) -> int:
        return self.count

    @contextlib.contextmanager
    def installed(self) -> Iterator["Interrupts"]:
        """Installs the handler, unless SIGINT is ignored (as in a shell's background job) or handled by the caller."""
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or before not in (signal.default_int_handler, signals.interrupt):
            yield self
            return
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or not self._is_under_way:
            raise KeyboardInterrupt
        if self._words:
            with contextlib.suppress(OSError, RuntimeError):  # stderr is closed, or was being written to
                self._say(self._words)
