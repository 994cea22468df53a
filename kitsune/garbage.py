"""Python's garbage collector, kept out of a block that it would disturb, and asked for the tensors that it knows."""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def live_tensors() -> Iterator[torch.Tensor]:
    """All that live in Python; by type: to ask an object for its class may run code of the user's."""
    return (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
