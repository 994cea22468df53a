"""Two lists of tensors in; how large they are and how far they lie apart, tensor by tensor, out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Euclidean norms of our tensors, of theirs, and of the differences, by tensor, and how many elements each has.

    A tensor that is None counts as zeros.
    """

    ours: Sequence[float]
    theirs: Sequence[float]
    apart: Sequence[float]
    elements: Sequence[int]

    @property
    def distance(self) -> float:
        return total(self.apart)

    @property
    def size(self) -> float:
        """Of ours, all together."""
        return total(self.ours)

    @property
    def their_size(self) -> float:
        return total(self.theirs)

    @property
    def density(self) -> float:
        """Root mean square over all elements of theirs."""
        return self.their_size / math.sqrt(max(1, sum(self.elements)))


def total(norms: Sequence[float]) -> float:
    """The norm of all together."""
    return math.sqrt(sum(norm * norm for norm in norms))


@dataclass(frozen=True, slots=True)
class Ruler:
    """Measures in float64, on a device: tensors that are elsewhere are taken there one by one, once.

    All that a gate compares of BERT-base takes 30 s on two cores.
    """

    device: torch.device

    def lengths(self, ours: Tensors, theirs: Tensors) -> Lengths:
        rows, elements = [], []
        for a, b in zip(map(self._moved, ours), map(self._moved, theirs), strict=True):
            rows.append(torch.stack([self._norm(a), self._norm(b), self._norm(_difference(a, b))]))
            elements.append(_elements(a if b is None else b))
        if not rows:
            return Lengths((), (), (), ())
        of_ours, of_theirs, apart = torch.stack(rows).T.tolist()  # the device is waited for once
        return Lengths(of_ours, of_theirs, apart, elements)

    def norm(self, tensors: Tensors) -> float:
        return total([float(self._norm(self._moved(tensor))) for tensor in tensors])

    def distance(self, ours: Tensors, theirs: Tensors) -> float:
        """The norm of the difference."""
        return self.lengths(ours, theirs).distance

    def _moved(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self.device)

    def _norm(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None or tensor.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        sizes = tensor.abs() if tensor.is_complex() else tensor
        floats = sizes if sizes.is_floating_point() else sizes.double()
        norm: torch.Tensor = torch.linalg.vector_norm(floats, dtype=torch.float64)
        return norm


HOST = Ruler(torch.device("cpu"))


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(wide) - b.to(wide)


def _elements(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
