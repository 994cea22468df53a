"""Prefetcher: fetches batches of a loader ahead in a background thread, and copies them to the device."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import torch

from kitsune.device.backend import pick_device
from kitsune.errors import SettingsError
from kitsune.memory.modes import Modes, modes
from kitsune.memory.transfer import Transfer, transfer_to

Batch = TypeVar("Batch")
Orders = SimpleQueue["Future[Any] | None"]  # None: no more are wanted

# Seconds that closing waits for a loader in the middle of a batch. The thread ends after that batch in any case.
JOIN_S: Final = 1.0


class Prefetcher:
    """Fetches up to `lookahead` batches ahead and copies them to the device.

    `device`: None means the current GPU, or the CPU without one, on which nothing is copied.

    Raises SettingsError for a lookahead below 1, UnfitError when the device does not exist.
    """

    def __init__(self, device: torch.device | str | None = None, lookahead: int = 2) -> None:
        if type(lookahead) is not int or lookahead < 1:
            raise SettingsError(f"lookahead is {lookahead!r}; it is the number of batches taken ahead, at least 1")
        self.device = pick_device(device)
        self.lookahead = lookahead

    def wrap(self, loader: Iterable[Batch]) -> "Prefetched[Batch]":
        """The batches of any iterable, in order. The result can be iterated as often as the loader."""
        return Prefetched(loader, self.device, self.lookahead)


class Prefetched(Generic[Batch]):
    """A loader whose batches are fetched ahead. `len` is that of the loader, if it has one.

    Tensors in tuples, lists, dicts, namedtuples and other registered pytrees are copied to the device; other objects
    are passed on. A loader must not write to a batch that it has returned, which may still be in use.

    The loader runs in the modes of the iterating thread at the start of the iteration: grad and inference mode,
    autocast, default device.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device, lookahead: int) -> None:
        self._loader = loader
        self._device = device
        self._lookahead = lookahead

    def __iter__(self) -> "Ahead[Batch]":
        return Ahead(iter(self._loader), transfer_to(self._device), self._lookahead)

    def __len__(self) -> int:
        """The number of batches of the loader. Raises TypeError when it has no length."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return len(self._loader)


class Ahead(Iterator[Batch]):
    """One iteration. An exception of the loader is raised in place of its batch.

    `close`, which also runs when the iterator is destroyed, ends the thread and releases the loader's iterator.
    """

    def __init__(self, batches: Iterator[Batch], transfer: Transfer, lookahead: int) -> None:
        self._transfer = transfer
        self._orders: Orders = SimpleQueue()
        self._due: deque[Future[Any]] = deque()
        for _ in range(lookahead):
            self._order()
        worker = threading.Thread(
            target=work, args=(batches, transfer, self._orders, modes()), name="kitsune-prefetch", daemon=True
        )
        worker.start()
        # The thread holds no reference to this object, so destroying the object ends the thread.
        self._stop = weakref.finalize(self, stop, self._orders, worker)

    def __next__(self) -> Batch:
        if not self._stop.alive:
            raise StopIteration
        try:
            sent = self._due.popleft().result()
        except BaseException:
            self.close()
            raise
        self._order()
        batch: Batch = self._transfer.receive(sent)
        return batch

    def close(self) -> None:
        """Ends the iteration. Waits at most one second for a loader in the middle of a batch."""
        self._stop()
        self._due.clear()

    def _order(self) -> None:
        """Requests one batch: the thread fetches only as many as were requested."""
        future: Future[Any] = Future()
        self._due.append(future)
        self._orders.put(future)


def work(batches: Iterator[Any], transfer: Transfer, orders: Orders, modes: Modes) -> None:
    """Thread function: fetches a batch for each request, until told to stop or the loader is exhausted."""
    is_open = True
    with modes.enter():
        while is_open and (future := orders.get()) is not None:
            try:
                future.set_result(transfer.send(batches))
            except BaseException as error:  # noqa: BLE001 - passed on to the consumer, StopIteration too
                future.set_exception(error)
                is_open = False
            # While waiting, this frame must not keep a batch alive; an exception references the frame, too.
            del future


def stop(orders: Orders, worker: threading.Thread) -> None:
    """Cancels all requests and ends the thread. SimpleQueue is safe to use during garbage collection."""
    with contextlib.suppress(Empty):
        while True:
            orders.get_nowait()
    orders.put(None)
    if worker is not threading.current_thread():  # the garbage collector may run in that thread
        worker.join(JOIN_S)
