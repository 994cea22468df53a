"""Writes and reads `.npy` members (format version 1.0, C order, no object arrays)."""

from collections.abc import Sequence
from math import prod
from typing import Final

from kitsune.errors import ArchiveError
from kitsune.submission.format.limits import ITEM_BYTES, MAX_BUFFER_BYTES

# The format has no name for bfloat16: its bits are stored as 16-bit integers.
_DESCRIPTIONS: Final = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
}


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """The only header that is written and accepted for an array of this dtype and shape."""
    words = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': '{_DESCRIPTIONS[dtype]}', 'fortran_order': False, 'shape': ({words}), }}"
    padding = -(10 + len(text) + 1) % 64
    body = text.encode() + b" " * padding + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def read_npy(member: bytes, dtype: str, shape: Sequence[int], name: str) -> bytes:
    """The raw little-endian bytes of the array. Raises ArchiveError unless it is exactly of this dtype and shape."""
    size = prod(shape) * ITEM_BYTES[dtype]
    if size > MAX_BUFFER_BYTES:
        raise ArchiveError(f"{name}: {size} bytes of values, more than the {MAX_BUFFER_BYTES} that are allowed")
    header = npy_header(dtype, shape)
    if not member.startswith(header):
        raise ArchiveError(f"{name}: is not a C-ordered {dtype} array of shape {list(shape)}, as graph.json says")
    values = member[len(header) :]
    if len(values) != size:
        raise ArchiveError(f"{name}: holds {len(values)} bytes of values; its shape needs {size}")
    if dtype == "bool" and values.strip(b"\x00\x01"):
        raise ArchiveError(f"{name}: a bool is neither 0 nor 1")
    return values
