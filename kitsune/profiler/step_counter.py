"""One step of a loop in; out comes what a GPU ran in it, and how often torch had to ask CUDA for memory."""

from dataclasses import dataclass

import torch

from kitsune.profiler.streams import StreamProfile, StreamWatch


@dataclass(frozen=True, slots=True)
class StepCount:
    """`allocations`: how often memory of the GPU was asked for in a step; `hits`: how often torch had it there."""

    streams: StreamProfile
    allocations: int
    hits: int

    @property
    def hit_rate(self) -> float | None:
        """From 0 to 1; None where no memory was asked for."""
        return self.hits / self.allocations if self.allocations else None


class StepCounter:
    """Counts from now on, until `end`. Waits for the GPU, now and at the end.

    Raises CaptureError where another profiler is in the way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = asked(device)
        self._watch = StreamWatch(device)

    def end(self) -> StepCount:
        """Raises CaptureError where no kernel was seen."""
        allocations, segments = (now - before for now, before in zip(asked(self._device), self._before, strict=True))
        return StepCount(self._watch.end(), allocations, allocations - segments)

    def drop(self) -> None:
        """Ends it, and forgets what was seen."""
        self._watch.drop()


def asked(device: torch.device) -> tuple[int, int]:
    """How often torch was asked for memory of a GPU so far, and how often it asked CUDA for some then."""
    stats = torch.cuda.memory_stats(device)
    return stats.get("allocation.all.allocated", 0), stats.get("segment.all.allocated", 0)
