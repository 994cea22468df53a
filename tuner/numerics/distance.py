"""Norms of two lists of tensors and of their differences, tensor by tensor, in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Euclidean norm per tensor of ours, of theirs and of the difference, and the number of elements.

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
        """Norm of all our tensors together."""
        return total(self.ours)

    @property
    def their_size(self) -> float:
        return total(self.theirs)

    @property
    def density(self) -> float:
        """Root mean square of all elements of their tensors."""
        return self.their_size / math.sqrt(max(1, sum(self.elements)))


def total(norms: Sequence[float]) -> float:
    """The norm of all tensors together, from their single norms."""
    return math.sqrt(sum(norm * norm for norm in norms))


@dataclass(frozen=True, slots=True)
class Ruler:
    """Computes norms in float64 on a device; tensors from elsewhere are moved there one by one.

    On two CPU cores, all comparisons of the gate for BERT-base would take 30 s.
    """

    device: torch.device

    def lengths(self, ours: Tensors, theirs: Tensors) -> Lengths:
        rows, elements = [], []
        for a, b in zip(map(self._moved, ours), map(self._moved, theirs), strict=True):
            rows.append(torch.stack([self._norm(a), self._norm(b), self._norm(_difference(a, b))]))
            elements.append(_elements(a if b is None else b))
        if not rows:
            return Lengths((), (), (), ())
        of_ours, of_theirs, apart = torch.stack(rows).T.tolist()  # one synchronization with the device
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
