"""Backwards on the thread that calls them: while a step is planned, and where a backward is one replay of a graph.

Autograd hands backwards on a GPU to a thread of its own and waits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Backwards in here run on the calling thread, which issues the recorded launches of a step as well.

    cuDNN keeps its plans by thread, and where cudnn.benchmark is set each thread times the algorithms for itself: on
    autograd's thread the backward would use others than its launches, with other numbers (GoogLeNet on an H200).
    """
    with torch.autograd.set_multithreading_enabled(False):
        yield


class CallingThread:
    """Between `take` and `leave`, backwards that this thread calls run on it. What the user set himself stays.

    For replays: to the other thread and back takes longer than a small model's backward itself.
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
        if thread == threading.get_ident():  # the setting is one of each thread
            setting.__exit__(None, None, None)
