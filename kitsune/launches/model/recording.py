"""Recording: the launches of one step, how to issue each again, and the memory that existed before the step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kitsune.device.saved_state import SavedState
from kitsune.device.tensor_bytes import as_bytes
from kitsune.launches.model.launch_graph import LaunchGraph, Span

#: Types of arguments of operations, besides tensors and containers.
VALUES: Final = frozenset({NoneType, bool, int, float, str, torch.dtype, torch.device, torch.layout})


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor of the recording: a storage of the graph, a dtype, and size, stride and offset in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def span(self) -> Span:
        """The bytes from the first to the last element, including those that a stride skips."""
        width = self.dtype.itemsize
        if 0 in self.size:
            return Span(self.storage, self.offset * width, self.offset * width)
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return Span(self.storage, self.offset * width, (last + 1) * width)


@dataclass(frozen=True, slots=True)
class Call:
    """How to issue a launch again. A TensorView stands for each tensor in `arguments` and `named`.

    `in_grad_mode`: whether gradients were enabled, since operations depend on it (an LSTM on a CPU keeps its workspace
    only then). `results`: one entry for each leaf of what the call returns, None if it is not a tensor. `allocates`:
    the storages that must be allocated before the call.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    in_grad_mode: bool = False
    results: tuple[TensorView | None, ...] = ()
    allocates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """One step. `calls` and `graph.launches` correspond one to one. `held`: the storages that existed before the step.

    `result`: what the step returned, with a TensorView for each. `generators`: those of the user's own that it draws
    from.
    """

    device: torch.device
    graph: LaunchGraph
    calls: tuple[Call, ...]
    held: Mapping[int, torch.UntypedStorage]
    result: Any
    generators: tuple[torch.Generator, ...] = ()

    def changed(self) -> list[int]:
        """The storages from before the step that it writes."""
        return sorted(self.graph.written() & self.held.keys())

    def saved_state(self) -> SavedState:
        """What the step changes, as bytes of the `changed` storages and generators, so that it can be rolled back."""
        storages = [self.held[number] for number in self.changed()]
        return SavedState(
            lambda: [as_bytes(storage) for storage in storages],
            self.device,
            self.generators,
            resized="the step changes the size of a storage from before the step (`resize_`)",
        )


def places_of(tree: Any) -> Iterator[TensorView]:
    return (leaf for leaf in pytree.tree_leaves(tree, is_leaf=is_place) if is_place(leaf))


def map_places(function: Callable[[TensorView], Any], tree: Any) -> Any:
    """Replaces each TensorView in a tree. Faster than pytree for common containers: 14 ms for 535 launches, not 22."""
    kind = type(tree)
    if kind is TensorView:
        return function(tree)
    if kind in VALUES:
        return tree
    if kind is tuple or kind is list:
        return kind([map_places(function, item) for item in tree])
    if kind is dict:
        return {key: map_places(function, item) for key, item in tree.items()}
    return pytree.tree_map(lambda leaf: function(leaf) if is_place(leaf) else leaf, tree, is_leaf=is_place)


def spans(places: Iterable[TensorView]) -> tuple[Span, ...]:
    return tuple(dict.fromkeys(place.span() for place in places))


def generators_in(tree: Any) -> list[torch.Generator]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Generator)]


def is_place(value: Any) -> bool:
    return isinstance(value, TensorView)
