"""Products of matrices in tiles, on Hopper or newer: what the kernels that compute them share."""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kitsune.kernels.dtypes import DTYPES
from kitsune.kernels.launch import IS_INTERPRETED, bind_context, on_device_of

#: In the interpreter fp32 shows what the roundings of half precision hide.
OFFERED: Final = DTYPES if IS_INTERPRETED else (torch.bfloat16, torch.float16)
#: The interpreter multiplies in NumPy, which has no bf16.
IS_WIDENED: Final = tl.constexpr(IS_INTERPRETED)
#: The first compute capability whose tensor memory accelerator loads and stores whole tiles.
HOPPER: Final = 9
#: The tensor memory accelerator needs rows that start at multiples of so many bytes.
ALIGNED: Final = 16
#: The Triton whose Gluon the kernels for Hopper were measured with. Gluon is experimental, and a kernel may hang where
#: it changes.
HAS_GLUON: Final[bool] = triton.__version__.startswith("3.6.")


class Tiling(NamedTuple):
    """How a product is tiled: `high` x `wide` elements of the result, `deep` products of each at once.

    A tile is stored in so many `pieces` side by side, through the shared memory of one. `programs` are resident on each
    multiprocessor, by a limit of `registers` for each thread where the compiler would take more.
    """

    high: int
    wide: int
    deep: int
    pieces: int
    stages: int
    warps: int
    programs: int
    registers: int | None = None


def takes_turns(result: torch.Tensor, tiling: Tiling, least_tiles: int = 1) -> bool:
    """Whether a kernel in Gluon computes a result, whose tiles are as large: in bf16, on Hopper, and of so many tiles
    for each multiprocessor.

    In fp16 the assembler would not let the products of the forwards overlap (C7514); the backwards were not measured.
    """
    return (
        HAS_GLUON
        and not IS_INTERPRETED
        and result.is_cuda
        and result.dtype == torch.bfloat16
        and torch.cuda.get_device_properties(result.device).major == HOPPER
        and tiles_of(result, tiling) >= least_tiles * multiprocessors_of(result.device)
    )


def described(matrix: torch.Tensor, high: int, wide: int) -> TensorDescriptor:
    """The matrix in tiles (high, wide). The descriptor is passed by value, so a CUDA graph keeps it."""
    return TensorDescriptor.from_tensor(readable(matrix), [high, wide])


def readable(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, copied where the tensor memory accelerator could not read it."""
    matrix = matrix.contiguous()
    is_aligned = matrix.data_ptr() % ALIGNED == matrix.stride(0) * matrix.element_size() % ALIGNED == 0
    return matrix if is_aligned else matrix.clone(memory_format=torch.contiguous_format)


def in_rows(right: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """(the matrix (inner, columns), False), or where its columns are contiguous (its transpose, True).

    Kernels read either as it lies in memory: weights of linear layers, and of the Conv1D of GPT-2.
    """
    is_transposed = right.stride(0) < right.stride(1)
    return (right.t(), True) if is_transposed else (right, False)


def sides(deep: int, wide: int, is_transposed: bool) -> tuple[int, int]:
    """Of the tiles in which kernels load what `in_rows` gives."""
    return (wide, deep) if is_transposed else (deep, wide)


def launch(kernel: Any, tiling: Tiling, result: torch.Tensor, inner: int, *given: Any) -> None:
    """Runs a kernel on as many programs as are resident at once, each of which computes tile after tile."""
    rows, columns = result.shape
    *sizes, stages, warps, each, registers = tiling
    options = {"num_stages": stages, "num_warps": warps, "maxnreg": registers}
    most = each * (multiprocessors_of(result.device) if result.is_cuda else 1)
    programs = min(most, tiles_of(result, tiling))
    with on_device_of(result):
        bind_context(result.device)
        kernel[(programs,)](*given, rows, columns, inner, programs, *sizes, **options)


def tiles_of(result: torch.Tensor, tiling: Tiling) -> int:
    rows, columns = result.shape
    return triton.cdiv(rows, tiling.high) * triton.cdiv(columns, tiling.wide)


def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def with_product(total, one, other):
    if IS_WIDENED:
        one, other = one.to(tl.float32), other.to(tl.float32)
    return tl.dot(one, other, total)


@triton.jit
def tile_of(right, at, column, IS_TRANSPOSED: tl.constexpr):
    """The tile (inner, columns) there, of a matrix (inner, columns) or its transpose."""
    return right.load([column, at]).T if IS_TRANSPOSED else right.load([at, column])


@triton.jit
def place_of(tile, rows, columns, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """(first row, first column) of a tile. Eight rows of tiles are done column by column, to be read from L2."""
    down, across = tl.cdiv(rows, HIGH), tl.cdiv(columns, WIDE)
    above = tile // (8 * across) * 8
    high = tl.minimum(down - above, 8)
    within = tile % (8 * across)
    return (above + within % high) * HIGH, within // high * WIDE


@triton.jit
def halves_of(tile):
    """(its left half, its right half)."""
    pairs = tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1))
    return tl.split(pairs)


@triton.jit
def joined(left, right):
    """The inverse of `halves_of`."""
    pairs = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(pairs, (left.shape[0], 2 * left.shape[1]))
