"""TF32 for matrix products and convolutions: on or off in a block, the user's flags afterwards."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

#: Both spellings of torch's flags, old and new; an old one is None where the user set the new one only.
Flags = tuple[str | None, bool | None, list[str]]


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """TF32 in the block."""
    with _restored():
        _put_old(is_allowed=True)
        yield


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 in the block, nor bf16 on a CPU: what the new flags of a library, or of all of them, say is overruled."""
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
    """The old flags first: setting one of them sets the new ones of its places as well.

    To the letter: "ieee" in place of "none" is another key of Inductor's cache, so all would be compiled again.
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
