"""Runs backwards on the calling thread, while a step is planned and where a backward is one replay of a graph.

Without this, autograd runs backwards on a GPU on a thread of its own, and the caller waits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Runs backwards in the block on the calling thread, which also issues the recorded launches of a step.

    cuDNN keeps its plans by thread, and with cudnn.benchmark each thread times the algorithms for itself. On autograd's
    thread a backward would use other algorithms than its recorded launches, with other results (GoogLeNet on an H200).
    """
    with torch.autograd.set_multithreading_enabled(False):
        yield


class CallingThread:
    """Between `take` and `leave`, backwards that this thread calls run on it. The user's own setting is restored.

    Used for replays: changing to the other thread and back takes longer than the backward of a small model.
    """

    def __init__(self) -> None:
        self._taken: tuple[torch.autograd.grad_mode.set_multithreading_enabled, int] | None = None

    def take(self) -> None:
        if self._taken is None:
            self._taken = torch.autograd.grad_mode.set_multithreading_enabled(False), threading.get_ident()

    def leave(self) -> None:
        if self._taken is None:
            return
        setting, thread = self._taken
        self._taken = None
        if thread == threading.get_ident():  # the setting is thread-local
            setting.__exit__(None, None, None)
