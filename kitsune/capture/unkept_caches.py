"""Caches for generation, which models of transformers return from every forward, also while they train.

A training loop reads none of them, and their tensors would be among those that a replay overwrites. So a captured
forward gives out an UnkeptCache in the place of each.
"""

import sys
from typing import Any


class UnkeptCache:
    """Stands in the output of a captured forward for a cache. All that reads it raises AttributeError or TypeError."""

    _kind = "cache"  # read while a copy is made, before it has its own

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"there is no {name!r}: the forward that made this {self._kind} was captured, and keeps none; train with "
            "capture_graph=False to use it"
        )

    def __repr__(self) -> str:
        return f"<a {self._kind} that was not kept>"


def cache_classes() -> tuple[type, ...]:
    """The base class of caches; none where transformers is not loaded."""
    loaded = sys.modules.get("transformers.cache_utils")
    return () if loaded is None else (loaded.Cache,)


def is_cache(value: Any) -> bool:
    return isinstance(value, cache_classes())


def unkept(leaf: Any) -> Any:
    """What a captured forward gives out in place of a leaf of its output that is no tensor."""
    return UnkeptCache(type(leaf).__name__) if is_cache(leaf) else leaf
