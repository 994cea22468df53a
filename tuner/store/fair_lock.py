"""A fair (first-in, first-out) lock for threads.

A `threading.Lock` goes to whichever thread asks at the right moment, so on a busy core a thread may starve.
"""

import threading
from collections import deque


class Turns:
    """A lock that is handed over to the thread that has waited longest."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._is_taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take(self, timeout_s: float) -> bool:
        """Acquires the lock; False when that takes longer than `timeout_s`."""
        with self._changing:
            if not self._is_taken:
                self._is_taken = True
                return True
            mine = threading.Event()
            self._waiting.append(mine)
        try:
            has_come = mine.wait(timeout_s)
        except BaseException:  # raised by a signal handler: if the lock was just handed over, release it
            if not self._leaves(mine):
                self.end()
            raise
        return has_come or not self._leaves(mine)

    def _leaves(self, mine: threading.Event) -> bool:
        """Removes the waiter from the queue; False if the lock was handed over to it in the meantime."""
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
