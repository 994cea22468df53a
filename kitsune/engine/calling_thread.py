"""CallingThread: where a backward runs that is one replay of a graph: on the thread that calls it.

Autograd hands backwards on a GPU to a thread of its own and waits. There and back takes a third of an MLP's whole step:
0.76 ms instead of 0.48 (H200, benchmarks/results/training_step/2026-11-22-h200-9.jsonl).
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
