"""A name in, how long it has to wait before it may ask again out: a token bucket for each, in this process."""

import time

#: Beyond so many names those that have asked for nothing for the longest are forgotten, and begin anew.
MOST_NAMES = 10_000


class Rate:
    """So many requests a minute, of which those that were saved up may come at once; 0 is any number.

    For the event loop only: nothing here waits, so nothing needs a lock.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def wait_s(self, name: str) -> float:
        """0 when it may ask, and then it has asked."""
        if not self.per_minute:
            return 0.0
        now = time.monotonic()
        left, at = self._left.pop(name, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - at) * self.per_minute / 60)
        wait_s = max(0.0, (1 - left) * 60 / self.per_minute)
        self._left[name] = (left if wait_s else left - 1), now
        while len(self._left) > MOST_NAMES:
            del self._left[next(iter(self._left))]
        return wait_s
