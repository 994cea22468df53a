"""Products by each algorithm that cuBLASLt proposes, through its C interface; torch only takes the first.

The library is the one that torch has loaded. Structures are opaque here, all but the result of a heuristic.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

TYPES: Final = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
COMPUTE_32F: Final = 68
TRANSA, TRANSB = 3, 4
MAX_WORKSPACE_BYTES: Final = 1
#: What torch gives cuBLASLt on Hopper.
WORKSPACE_BYTES: Final = 32 * 2**20
ONE, ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def library() -> Any:
    assert torch.version.cuda is not None
    torch.zeros(1, device="cuda")  # torch loads cuBLAS with its first context
    found = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    found.cublasLtCreate.restype = ctypes.c_int
    return found


def checked(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLASLt: status {status}")


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix as cuBLASLt sees it, by columns: its memory, and whether it reads it transposed."""

    tensor: torch.Tensor
    rows: int
    columns: int
    stride: int
    is_turned: bool

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "Operand":
        """Of a contiguous matrix, or of the transpose of one. A row-major matrix is its transpose by columns."""
        is_turned = not matrix.is_contiguous()
        rows, columns = (matrix.t() if is_turned else matrix).shape
        return cls(matrix, columns, rows, columns, is_turned)


class Product:
    """`one @ other` into `out`, in one dtype, with sums in fp32, by the algorithms of cuBLASLt, best guess first."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor, out: torch.Tensor, most: int = 8) -> None:
        self.library, self.handle = library(), ctypes.c_void_p()
        checked(self.library.cublasLtCreate(ctypes.byref(self.handle)))
        # By columns the transpose is computed: the second matrix comes first.
        self.operands = Operand.of(other), Operand.of(one), Operand.of(out)
        self.description = self.described()
        self.layouts = [self.layout(operand) for operand in self.operands]
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=out.device)
        self.found = list(self.proposed(most))

    def described(self) -> ctypes.c_void_p:
        description = ctypes.c_void_p()
        checked(self.library.cublasLtMatmulDescCreate(ctypes.byref(description), COMPUTE_32F, TYPES[torch.float32]))
        for attribute, operand in zip((TRANSA, TRANSB), self.operands, strict=False):
            value = ctypes.c_int32(int(operand.is_turned))
            checked(
                self.library.cublasLtMatmulDescSetAttribute(
                    description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                )
            )
        return description

    def layout(self, operand: Operand) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        checked(
            self.library.cublasLtMatrixLayoutCreate(
                ctypes.byref(layout),
                TYPES[operand.tensor.dtype],
                ctypes.c_uint64(operand.rows),
                ctypes.c_uint64(operand.columns),
                ctypes.c_int64(operand.stride),
            )
        )
        return layout

    def proposed(self, most: int) -> Iterator[Heuristic]:
        preference, count, results = ctypes.c_void_p(), ctypes.c_int(), (Heuristic * most)()
        checked(self.library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        limit = ctypes.c_size_t(WORKSPACE_BYTES)
        checked(
            self.library.cublasLtMatmulPreferenceSetAttribute(
                preference, MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.c_size_t(ctypes.sizeof(limit))
            )
        )
        first, second, result = self.layouts
        checked(
            self.library.cublasLtMatmulAlgoGetHeuristic(
                *(self.handle, self.description, first, second, result, result, preference, most),
                *(results, ctypes.byref(count)),
            )
        )
        yield from (each for each in results[: count.value] if each.status == 0)

    def run(self, at: int) -> torch.Tensor:
        """By the algorithm of this number, on the current stream."""
        first, second, result = (ctypes.c_void_p(operand.tensor.data_ptr()) for operand in self.operands)
        chosen = self.found[at]
        checked(
            self.library.cublasLtMatmul(
                *(self.handle, self.description, ctypes.byref(ONE), first, self.layouts[0], second, self.layouts[1]),
                *(ctypes.byref(ZERO), result, self.layouts[2], result, self.layouts[2]),
                ctypes.byref(chosen.algorithm),
                *(ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES)),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )
        return self.operands[2].tensor
