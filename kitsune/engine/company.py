"""A Recording in, its step out with other work beside every launch on the GPU.

Blocks that add to the same numbers end in the same order again and again as long as nothing else runs: a step may come
to the same bits every time alone, and to others beside another stream. On an H200 the backward of torch's
memory-efficient attention in fp32 is such an operation: of 807 tensors of BERT-base's step none differs alone, and up
to 582 do beside the launches of another branch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from kitsune.engine.issue import HostLane, in_recorded_order
from kitsune.engine.recording import Recording

#: Of the square matrices that are multiplied: 60 us on half an H200. What fills a GPU makes the launch wait and changes
#: nothing: twelve attentions came to other bits in 9 of 40 runs beside these, in none beside larger ones.
SIDE: Final = 1024
LAUNCHES: Final = 2  # beside each of the step's


def in_company(recording: Recording) -> Callable[[], Any]:
    """The launches as they were recorded, one after the other. On a CPU nobody is beside them."""
    if recording.device.type != "cuda":
        return in_recorded_order(recording)
    return in_recorded_order(recording, Accompanied(recording.device))


class Accompanied(HostLane):
    """One after the other on the current stream, each beginning together with work on another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = company_stream(device.index or 0)
        self._matrix = torch.ones(SIDE, SIDE, device=device)
        self._product = torch.empty_like(self._matrix)

    def __exit__(self, *_: object) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def submit(self, lane: int, launch: int, waits: Sequence[int], run: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(LAUNCHES):
                torch.mm(self._matrix, self._matrix, out=self._product)
        super().submit(lane, launch, waits, run)


@functools.cache
def company_stream(index: int) -> torch.cuda.Stream:
    """One for each GPU: cuBLAS keeps a workspace for every stream it has ever seen."""
    return torch.cuda.Stream(index)
