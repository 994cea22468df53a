"""Large outputs that a model returns and keeps nowhere else: only these may have rows with gaps between them.

A loop gets them as contiguous tensors. Anything else that leaves a compiled graph, such as a tensor that a hook or an
attribute keeps, reaches code of the user's as it is, and gaps would break a view there.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kitsune.autograd.half_outputs import stays_half
from kitsune.device.gc_control import live_tensors

#: Rows of fewer classes are not worth a forward as given.
LEAST_CLASSES: Final = 1024
#: Elements of 16 bytes in half precision.
ALIGNED: Final = 8

#: (elements, size of the last dimension) of an output.
Kind = tuple[int, int]


class SoleOutputs:
    """The kinds of such outputs, learned from one forward of the model as given under the autocast of the plan."""

    def __init__(self) -> None:
        self.is_known = False
        self._kinds: frozenset[Kind] = frozenset()

    def __contains__(self, output: torch.Tensor) -> bool:
        return kind_of(output) in self._kinds

    def learned_from(self, output: Any) -> Callable[[], None]:
        """A function that learns of the output of a forward, to be called once nothing here refers to it."""
        large = [leaf for leaf in pytree.tree_leaves(output) if stays_half(leaf)]
        seen = [(kind_of(leaf), leaf.untyped_storage()._cdata) for leaf in large]

        def learn() -> None:
            self.is_known = True
            kept = storages_alive() if seen else set()
            self._kinds = frozenset(kind for kind, storage in seen if storage not in kept)

        return learn


def kind_of(output: torch.Tensor) -> Kind:
    return output.numel(), output.shape[-1] if output.ndim else 1


def storages_alive() -> set[int]:
    """Of all tensors in Python."""
    with torch._C.DisableTorchFunctionSubclass():
        return {each.untyped_storage()._cdata for each in live_tensors() if torch._C._has_storage(each)}


def has_unaligned_head(model: torch.nn.Module) -> bool:
    """Whether a weight may give large rows that begin at odd addresses."""
    return any(
        each.ndim == 2 and each.shape[0] >= LEAST_CLASSES and each.shape[0] % ALIGNED for each in model.parameters()
    )
