"""An address in, how long it is to wait before it tries another token, out."""

import ipaddress
import threading
import time
from typing import Final

#: So many tries that failed, within so many seconds. A token holds 256 bits of chance: this only tells whoever tries
#: at random, or by a script that goes on with an old token, to stop. A good token is never made to wait.
MOST: Final = 20
WITHIN_S: Final = 300.0
#: Beyond so many addresses the oldest are forgotten.
_ADDRESSES: Final = 10_000


class Attempts:
    """The failed tries of each address, in this process."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def wait_s(self, address: str) -> float:
        """0 when it may try."""
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
    """Whose address it is: of IPv6 the first 64 bits, since one customer has all the others."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))
