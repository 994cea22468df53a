"""Clock: timestamps on the current stream of a device, and the times between them, without waiting for the device."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from kitsune.device.backend import pick_device, synchronize
from kitsune.errors import CaptureError

Mark = float | torch.cuda.Event
MOST_PENDING: Final = 1000  # intervals of two events each; above it, finished ones are read early


class Clock:
    """Takes marks: CUDA events on a GPU, readings of time.perf_counter on a CPU.

    On a GPU an interval is the time between the moments at which the stream reaches the two marks. Raises UnfitError
    when the device does not exist. Does not change the current device.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def mark(self) -> Mark:
        """A mark now. Raises CaptureError during a CUDA graph capture, in which an event has no time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("nothing can be timed while a CUDA graph is captured; time its replay")
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def keep(self, begin: Mark, end: Mark, tell: Callable[[float], None]) -> None:
        """Calls `tell` with the milliseconds between two marks: at once on a CPU, in `settle` on a GPU."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float) and isinstance(end, float)
            tell((end - begin) * 1e3)
            return
        self._pending.append((begin, end, tell))
        if len(self._pending) > MOST_PENDING:
            while self._pending and self._pending[0][1].query():
                self._tell_first()

    def settle(self) -> None:
        """Calls the pending `tell` callbacks in order. Waits for the GPU once, if any is pending."""
        if self._pending:
            synchronize(self.device)
        while self._pending:
            self._tell_first()

    def _tell_first(self) -> None:
        begin, end, tell = self._pending.popleft()
        tell(float(begin.elapsed_time(end)))
