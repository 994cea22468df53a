"""CallingThread: where a backward runs that is one replay of a graph: on the thread that calls it.

Autograd hands backwards on a GPU to a thread of its own and waits. There and back takes longer than a small model's
backward itself.
"""

import threading

import torch


class CallingThread:
    """Between `take` and `leave`, backwards that this thread calls run on it. What the user set himself stays."""

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
