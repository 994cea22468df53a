"""A step in, the same step out with other work beside it on the GPU.

Blocks that add to the same numbers end in the same order again and again as long as nothing else runs: a step may come
to the same bits every time alone, and to others beside another stream. On an H200 the backward of torch's
memory-efficient attention in fp32 is such an operation: of 807 tensors of BERT-base's step none differs alone, and up
to 582 do beside the launches of another branch.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

#: Of the square matrices that are multiplied: 60 us a launch on half an H200. What fills a GPU makes the step wait and
#: changes nothing: twelve attentions came to other bits in 9 of 40 runs beside these, in none beside larger ones.
SIDE: Final = 1024
LAUNCHES: Final = 32  # are under way at a time, so that nobody waits long for the last of them


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
    stream = company_stream(device.index or 0)
    with torch.cuda.stream(stream):
        matrix = torch.ones(SIDE, SIDE, device=device)
        product = torch.empty_like(matrix)
        while not over.is_set():
            for _ in range(LAUNCHES):
                torch.mm(matrix, matrix, out=product)
            stream.synchronize()


@functools.cache
def company_stream(index: int) -> torch.cuda.Stream:
    """One for each GPU: cuBLAS keeps a workspace for every stream it has ever seen."""
    return torch.cuda.Stream(index)
