"""Threads in, one at a time out, in the order in which they came.

A `threading.Lock` is given to whoever asks at the right moment: on a busy core a thread may wait for it for ever.
"""

import threading
from collections import deque


class Turns:
    """A lock that its holder hands over to whoever has waited longest."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._is_taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take(self, timeout_s: float) -> bool:
        """Waits for its turn; False when it did not come in time."""
        with self._changing:
            if not self._is_taken:
                self._is_taken = True
                return True
            mine = threading.Event()
            self._waiting.append(mine)
        try:
            has_come = mine.wait(timeout_s)
        except BaseException:  # of a signal: nobody is left to end the turn
            if not self._leaves(mine):
                self.end()
            raise
        return has_come or not self._leaves(mine)

    def _leaves(self, mine: threading.Event) -> bool:
        """Whether it still waited; otherwise its turn has come in this very moment."""
        with self._changing:
            if mine.is_set():
                return False
            self._waiting.remove(mine)
            return True

    def end(self) -> None:
        with self._changing:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
