"""Parses sizes in bytes, and creates tensors on a given storage."""

from collections.abc import Sequence

import torch

from kitsune.base.byte_sizes import parse_bytes
from kitsune.errors import SettingsError


def bytes_of(option: str, size: int | str) -> int:
    """The bytes of 4096, '512MB' or '2GB' (binary units). Raises SettingsError naming the option; below 1 too."""
    try:
        nbytes = parse_bytes(size)
    except SettingsError as error:
        raise SettingsError(f"{option} is {size!r}; use bytes or a string as '512MB' or '2GB'") from error
    if nbytes < 1:
        raise SettingsError(f"{option} is {size!r}; it must be at least one byte")
    return nbytes


def rounded_up(nbytes: int, alignment_bytes: int) -> int:
    return -(-nbytes // alignment_bytes) * alignment_bytes


def tensor_on(
    storage: torch.UntypedStorage, offset_bytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor, not a view, on these bytes. The offset must be a multiple of the dtype's size."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset_bytes // dtype.itemsize, tuple(shape), tuple(stride))
