"""A step in, the same step out with other work beside it on the GPU.

Blocks that add to the same numbers end in the same order again and again as long as nothing else runs: a step may come
to the same bits every time alone, and to others beside another stream. On an H200 the backward of torch's
memory-efficient attention in fp32 is such an operation: of 807 tensors of BERT-base's step none differs alone, and up
to 582 do beside the launches of another branch.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

NUMBERS: Final = 2**24  # 64 MiB: 30 us a launch on an H200, on all of its multiprocessors
LAUNCHES: Final = 128  # are under way at a time, so that nobody waits long for the last of them


def in_company(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """On a CPU the step itself."""
    if device.type != "cuda":
        return step

    def both() -> Any:
        with company(device):
            result = step()
            torch.cuda.current_stream(device).synchronize()
            return result

    return both


@contextlib.contextmanager
def company(device: torch.device) -> Iterator[None]:
    """Launches by another thread on another stream until the block has ended."""
    over = threading.Event()
    worker = threading.Thread(target=keep_busy, args=(device, over))
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()


def keep_busy(device: torch.device, over: threading.Event) -> None:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        numbers = torch.ones(NUMBERS, device=device)
        while not over.is_set():
            for _ in range(LAUNCHES):
                numbers.neg_()
            stream.synchronize()
