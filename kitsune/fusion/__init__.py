"""Replaces patterns of a training step by Kitsune's Triton kernels, where these were measured to be faster.

Public names are bound lazily, as in `kitsune`: a FusionConfig needs no torch, and Triton is imported only to fuse.
Accessing a name raises UnfitError where Triton is needed and not installed.
"""

from typing import TYPE_CHECKING, Any

from kitsune.base import optional_imports

_HOMES = {
    "FusionConfig": "kitsune.fusion.config",
    "FusionEngine": "kitsune.fusion.engine",
    "FusionStats": "kitsune.fusion.stats",
    "Match": "kitsune.fusion.match",
    "Pattern": "kitsune.fusion.patterns",
    "operation_of": "kitsune.fusion.operations",
}
__all__ = ["FusionConfig", "FusionEngine", "FusionStats", "Match", "Pattern", "operation_of"]

if TYPE_CHECKING:
    from kitsune.fusion.config import FusionConfig as FusionConfig
    from kitsune.fusion.engine import FusionEngine as FusionEngine
    from kitsune.fusion.match import Match as Match
    from kitsune.fusion.operations import operation_of as operation_of
    from kitsune.fusion.patterns import Pattern as Pattern
    from kitsune.fusion.stats import FusionStats as FusionStats


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kitsune.fusion' has no attribute {name!r}")
    value = getattr(optional_imports.load(home, extra="triton", packages=("triton",)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
