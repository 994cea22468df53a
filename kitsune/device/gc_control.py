"""Python's garbage collector: disabling it for a block, and finding the live tensors that it tracks."""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from itertools import chain, filterfalse, groupby, starmap
from typing import Any

import torch


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def live_tensors() -> list[torch.Tensor]:
    """All tensors that are alive in Python. Found by type(): reading `__class__` of an object may run user code."""
    with uncollected():
        try:
            others: dict[type, Any] = dict.fromkeys(filterfalse(is_kind_of_tensor, set(map(type, tracked()))), ())
            found = list(chain.from_iterable(starmap(others.get, groupby(tracked(), type))))
        except TypeError:  # a user's metaclass that defines __eq__ makes its classes unhashable
            found = gc.get_objects()
    return [each for each in found if is_kind_of_tensor(type(each))]  # a type may have been created after `others`


def are_tracked(objects: Iterable[Any]) -> bool:
    """Whether the collector tracks all of these objects."""
    with uncollected():
        alive = set(map(id, tracked()))
    return alive.issuperset(map(id, objects))


def tracked() -> Iterator[Any]:
    """All objects that the collector tracks. Consume it in a single C call, as in `set(map(id, tracked()))`.

    They include tuples that other threads are still building (`tuple(generator)`), which fails with a SystemError while
    anyone else holds a reference. Threads switch only after a call, when its arguments are released. Do not use
    `itertools.tee`: it is among the objects and would keep itself alive.
    """
    return chain.from_iterable(map(gc.get_objects, (None,)))


def is_kind_of_tensor(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)
