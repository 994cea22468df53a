"""Backwards on the thread that calls them: while a step is planned, and where a backward is one replay of a graph.

Autograd hands backwards on a GPU to a thread of its own and waits.
"""

import threading

import torch


def on_one_thread() -> torch.autograd.grad_mode.set_multithreading_enabled:
    """A context in which a step and its recorded launches, which are issued by this thread, do the same.

    cuDNN's plans are of a thread, and where cudnn.benchmark is set each thread times its own: on autograd's thread the
    backward would take other algorithms than its launches, and come to other numbers (GoogLeNet on an H200).
    """
    return torch.autograd.set_multithreading_enabled(False)


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
