"""A device in, marks on its current stream and the times between them out; nothing waits before somebody asks."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from kitsune.device.backend import pick_device, synchronize
from kitsune.errors import CaptureError

Mark = float | torch.cuda.Event
MOST_PENDING: Final = 1000  # intervals; beyond that, those which have ended are read on the way: each holds two events


class Clock:
    """Marks are CUDA events on a GPU, and readings of time.perf_counter on a CPU.

    On a GPU an interval is the time on the stream: from when the GPU came to the first mark to when it came to the
    second.
    Raises UnfitError when the device is not there. The current device stays what it is.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = pick_device(device)
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def mark(self) -> Mark:
        """Raises CaptureError while a CUDA graph is captured: an event in it is a part of the graph, without a time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("nothing can be timed while a CUDA graph is captured; time its replay")
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def keep(self, begin: Mark, end: Mark, tell: Callable[[float], None]) -> None:
        """Has the milliseconds between two marks told once they are known: at once on a CPU, by `settle` on a GPU."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float) and isinstance(end, float)
            tell((end - begin) * 1e3)
            return
        self._pending.append((begin, end, tell))
        if len(self._pending) > MOST_PENDING:
            while self._pending and self._pending[0][1].query():
                self._tell_first()

    def settle(self) -> None:
        """Tells all that is kept, in the order in which it was kept. Waits for the GPU, once, if there is any."""
        if self._pending:
            synchronize(self.device)
        while self._pending:
            self._tell_first()

    def _tell_first(self) -> None:
        begin, end, tell = self._pending.popleft()
        tell(float(begin.elapsed_time(end)))
