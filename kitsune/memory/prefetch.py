"""Prefetcher: a loader goes in, the same batches come out, taken from it by a thread of their own ahead of time."""

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

# How long leaving a loop waits for a loader that is in the middle of a batch; after that batch the thread ends anyway.
JOIN_S: Final = 1.0


class Prefetcher:
    """Takes up to `lookahead` batches ahead, and has them on the device before they are asked for.

    `device`: None takes the current GPU, or the CPU where there is none, on which nothing is copied.

    Raises SettingsError for a lookahead below one, UnfitError when the device is not there.
    """

    def __init__(self, device: torch.device | str | None = None, lookahead: int = 2) -> None:
        if type(lookahead) is not int or lookahead < 1:
            raise SettingsError(f"lookahead is {lookahead!r}; it is the number of batches taken ahead, at least 1")
        self.device = pick_device(device)
        self.lookahead = lookahead

    def wrap(self, loader: Iterable[Batch]) -> "Prefetched[Batch]":
        """The batches of any iterable, in their order; it can be iterated as often as the loader itself."""
        return Prefetched(loader, self.device, self.lookahead)


class Prefetched(Generic[Batch]):
    """A loader whose batches are fetched ahead. `len` is that of the loader, where it has one.

    Tensors in tuples, lists, dicts, namedtuples and what else is registered with torch's pytrees come on the device;
    other objects come as they are. A loader must not write to a batch that it has given out: it is still in use.

    The loader runs in the modes that the iterating thread has when an iteration begins: grad and inference mode,
    autocast, default device.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device, lookahead: int) -> None:
        self._loader = loader
        self._device = device
        self._lookahead = lookahead

    def __iter__(self) -> "Ahead[Batch]":
        return Ahead(iter(self._loader), transfer_to(self._device), self._lookahead)

    def __len__(self) -> int:
        """Batches, as many as the loader has. Raises TypeError where it has no length."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return len(self._loader)


class Ahead(Iterator[Batch]):
    """One iteration. What the loader raises is raised where its batch would have come.

    `close`, which also happens when the iterator is dropped, has the thread end and let go of the loader's iterator.
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
        # The thread knows nothing of this object, so dropping it is enough to end both.
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
        """Ends the iteration now. Waits a second at most for a loader that is in the middle of a batch."""
        self._stop()
        self._due.clear()

    def _order(self) -> None:
        """One order for each batch: the thread takes none that was not ordered."""
        future: Future[Any] = Future()
        self._due.append(future)
        self._orders.put(future)


def work(batches: Iterator[Any], transfer: Transfer, orders: Orders, modes: Modes) -> None:
    """Takes a batch for each order, until no more are wanted or the loader has no more to give."""
    is_open = True
    with modes.enter():
        while is_open and (future := orders.get()) is not None:
            try:
                future.set_result(transfer.send(batches))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the loader's end too, the consumer gets it
                future.set_exception(error)
                is_open = False
            # A batch belongs to the consumer alone while this thread waits; and an error refers to this frame.
            del future


def stop(orders: Orders, worker: threading.Thread) -> None:
    """Takes all orders back and ends the thread. SimpleQueue may be used in the midst of garbage collection."""
    with contextlib.suppress(Empty):
        while True:
            orders.get_nowait()
    orders.put(None)
    if worker is not threading.current_thread():  # where the collector runs there and finds the iterator
        worker.join(JOIN_S)
