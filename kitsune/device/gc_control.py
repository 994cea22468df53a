"""Python's garbage collector, kept out of a block that it would disturb, and asked for the tensors that it knows."""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from itertools import chain, filterfalse, groupby, starmap
from typing import Any

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


def live_tensors() -> list[torch.Tensor]:
    """All that live in Python; by type: to ask an object for its class may run code of the user's."""
    with uncollected():
        try:
            others: dict[type, Any] = dict.fromkeys(filterfalse(is_kind_of_tensor, set(map(type, tracked()))), ())
            found = list(chain.from_iterable(starmap(others.get, groupby(tracked(), type))))
        except TypeError:  # a metaclass of the user's says what equals, and then its classes have no hash
            found = gc.get_objects()
    return [each for each in found if is_kind_of_tensor(type(each))]  # some other type may be younger than `others`


def are_tracked(objects: Iterable[Any]) -> bool:
    """Whether the collector knows all of them."""
    with uncollected():
        alive = set(map(id, tracked()))
    return alive.issuperset(map(id, objects))


def tracked() -> Iterator[Any]:
    """All that the collector knows, for one call into C to go through that drops it, as `set(map(id, tracked()))`.

    Among them are the tuples that other threads are just making (`tuple(generator)`), and to make one fails with a
    SystemError while anybody else holds it. Threads take turns after a call, not within one, and after its arguments
    are gone; not with `itertools.tee`, which would keep itself alive, as it is among them.
    """
    return chain.from_iterable(map(gc.get_objects, (None,)))


def is_kind_of_tensor(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)
