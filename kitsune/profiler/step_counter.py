"""StepCounter: what a GPU ran in one step of a loop, and how often torch's allocator had to call CUDA."""

from dataclasses import dataclass

import torch

from kitsune.profiler.streams import StreamProfile, StreamWatch


@dataclass(frozen=True, slots=True)
class StepCount:
    """Counts of one step. `allocations`: GPU allocations in torch. `hits`: those served from its cache."""

    streams: StreamProfile
    allocations: int
    hits: int

    @property
    def hit_rate(self) -> float | None:
        """`hits` over `allocations`; None without allocations."""
        return self.hits / self.allocations if self.allocations else None


class StepCounter:
    """Counts from now until `end`. Waits for the GPU at both ends.

    Raises CaptureError when another profiler is running.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = asked(device)
        self._watch = StreamWatch(device)

    def end(self) -> StepCount:
        """Stops, and returns the counts. Raises CaptureError when no kernel was seen."""
        allocations, segments = (now - before for now, before in zip(asked(self._device), self._before, strict=True))
        return StepCount(self._watch.end(), allocations, allocations - segments)

    def drop(self) -> None:
        """Stops and discards the result."""
        self._watch.drop()


def asked(device: torch.device) -> tuple[int, int]:
    """The numbers of allocations on a GPU so far: in torch's allocator, and of segments from CUDA."""
    stats = torch.cuda.memory_stats(device)
    return stats.get("allocation.all.allocated", 0), stats.get("segment.all.allocated", 0)
