"""Context managers that turn TF32 on or off for matrix products and convolutions, and restore the user's flags."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

#: Torch's old and new flags. An old flag is None where the user has set only the new one.
Flags = tuple[str | None, bool | None, list[str]]


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Turns TF32 on in the block."""
    with _restored():
        _put_old(is_allowed=True)
        yield


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Turns TF32 off in the block, and bf16 on a CPU. Overrides torch's new flags, per library and global."""
    with _restored():
        _put_old(is_allowed=False)
        for place in _places():
            place.fp32_precision = "ieee"
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    before = _flags()
    try:
        yield
    finally:
        _put(before)


def _put_old(*, is_allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def _flags() -> Flags:
    try:
        matmul: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = None
    try:
        cudnn: bool | None = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cudnn = None
    return matmul, cudnn, [place.fp32_precision for place in _places()]


def _put(before: Flags) -> None:
    """Restores the old flags first, since setting an old flag also sets the new flags of its libraries.

    Restores exactly: "ieee" instead of "none" changes the key of Inductor's cache, and everything is compiled again.
    """
    matmul, cudnn, precisions = before
    torch.set_float32_matmul_precision(matmul or "highest")
    torch.backends.cudnn.allow_tf32 = cudnn is not False
    for place, precision in zip(_places(), precisions, strict=True):
        place.fp32_precision = precision


def _places() -> list[Any]:
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    return [backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
