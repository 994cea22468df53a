"""Rate limiting per name with a token bucket, in memory of this process."""

import time

#: Above this number the least recently used names are dropped, and start with a full bucket again.
MOST_NAMES = 10_000


class Rate:
    """A limit of `per_minute` requests for each name, with bursts of up to `per_minute`; 0: no limit.

    Only for use in the event loop: nothing here waits, so there is no lock.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def wait_s(self, name: str) -> float:
        """Seconds until `name` may send its next request. 0: it may now, and the request is counted."""
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
