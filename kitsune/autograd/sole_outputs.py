"""Large outputs that a model returns and keeps nowhere else: only these may have rows with gaps between them.

A loop gets them as contiguous tensors. Anything else that leaves a compiled graph, such as a tensor that a hook or an
attribute keeps, reaches code of the user's as it is, and gaps would break a view there.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kitsune.autograd.half_outputs import HALF, stays_half
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

    def watch(self) -> "Watched":
        """To be called before the forward."""
        return Watched(self, half_alive())

    def learn(self, kinds: frozenset[Kind]) -> None:
        self.is_known = True
        self._kinds = kinds


class Watched:
    """A forward from which `sole` learns. `before`: tensors that other models or steps have, alive until then, so that
    no other gets their memory."""

    def __init__(self, sole: SoleOutputs, before: list[torch.Tensor]) -> None:
        self._sole = sole
        self._before = before

    def gave(self, output: Any) -> Callable[[], None]:
        """A function that learns of the output of the forward, to be called once nothing here refers to it."""
        kinds = {kind_of(leaf) for leaf in pytree.tree_leaves(output) if stays_half(leaf)}

        def learn() -> None:
            kept = self._sizes_kept() if kinds else set()
            self._sole.learn(frozenset(kind for kind in kinds if kind[0] not in kept))

        return learn

    def _sizes_kept(self) -> set[int]:
        """Elements of the memory of each tensor in half precision that the forward has left alive in Python: also of
        those that are no output but as large as one, since a compiled graph does not tell them apart."""
        before = {storage._cdata for storage in map(storage_of, self._before)}
        now = map(storage_of, half_alive())
        return {storage.nbytes() // HALF.itemsize for storage in now if storage._cdata not in before}


def kind_of(output: torch.Tensor) -> Kind:
    return output.numel(), output.shape[-1] if output.ndim else 1


def half_alive() -> list[torch.Tensor]:
    """All tensors in half precision that are alive in Python and have memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            each
            for each in live_tensors()
            if torch._C._has_storage(each) and torch.Tensor.dtype.__get__(each) == HALF  # type: ignore[attr-defined]
        ]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.untyped_storage(tensor)  # a subclass may have a method of its own


def has_unaligned_head(model: torch.nn.Module) -> bool:
    """Whether a linear layer may give large rows that begin at odd addresses."""
    heads = [each.out_features for each in model.modules() if isinstance(each, torch.nn.Linear)]
    return any(classes >= LEAST_CLASSES and classes % ALIGNED for classes in heads)
