"""Throttles failed sign-ins per client address."""

import ipaddress
import threading
import time
from typing import Final

#: Allowed failures within the period. A token has 256 bits of entropy, so this is not needed against guessing: it tells
#: scripts with an old token to stop. Valid tokens are never throttled.
MOST: Final = 20
WITHIN_S: Final = 300.0
#: Above this number the oldest addresses are dropped.
_ADDRESSES: Final = 10_000


class Attempts:
    """Failed attempts by address, in memory of this process."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def wait_s(self, address: str) -> float:
        """Seconds until the address may fail again; 0: now."""
        begin, failed = self._failed.get(network_of(address), (0.0, 0))
        return max(0.0, begin + WITHIN_S - time.monotonic()) if failed >= MOST else 0.0

    def note_failure(self, address: str) -> None:
        network, now = network_of(address), time.monotonic()
        with self._lock:
            begin, failed = self._failed.pop(network, (now, 0))
            self._failed[network] = (begin, failed + 1) if now < begin + WITHIN_S else (now, 1)
            while len(self._failed) > _ADDRESSES:
                del self._failed[next(iter(self._failed))]


def network_of(address: str) -> str:
    """The key of an address: for IPv6 its /64 network, which usually belongs to one customer."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))
