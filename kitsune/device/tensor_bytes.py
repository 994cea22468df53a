"""Tensors and storages as bytes, to copy and compare them."""

import torch


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether the bits are equal, so that NaN equals NaN."""
    return torch.equal(bytes_of(one), bytes_of(two))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of the tensor in their order, as a flat tensor of bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of bytes that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
