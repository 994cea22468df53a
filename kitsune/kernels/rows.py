"""Tiling of whole rows: rows for each program, their distribution in a backward pass, and the final reduction."""

from typing import Final

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch import block_of, on_device_of, warps_of

#: Elements that a program takes at once when rows are shorter.
TILE: Final = 2048

#: The number of an H200 and of an H100.
MULTIPROCESSORS: Final = 132


def warps_of_tile(elements: int) -> int:
    """The number of warps for a tile of rows: 16 elements a thread, which in 16 bits are two loads in flight.

    32 warps at most: by ptxas for sm_90, rows of 16384 elements or more spill far less than with 16 warps.
    """
    return min(32, max(1, elements // 512))


def tile_of(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows, block of each, warps) of a program: one long row, or many short ones to keep threads busy.

    Rows and block are powers of two. No more rows than the next power of two of `rows`.
    """
    block = block_of(columns)
    high = min(max(1, TILE // block), triton.next_power_of_2(rows))
    return high, block, warps_of_tile(high * block)


def shares_of(rows: int, high: int, warps: int) -> tuple[int, int]:
    """(programs, rows of each) of a backward pass that takes `high` rows at once with `warps` warps.

    16 resident warps a multiprocessor: they have 32 KB of 16-bit rows in flight, which hides memory latency, and more
    programs would leave more partial sums to add.
    """
    tiles = triton.cdiv(rows, high)
    each = triton.cdiv(tiles, MULTIPROCESSORS * max(1, 16 // warps))
    return triton.cdiv(tiles, each), each * high


def partials_of(shares: int, like: torch.Tensor | None) -> torch.Tensor | None:
    """A buffer for each program's part of the gradient of a weight (n,): (shares, n) in fp32. None for None."""
    return None if like is None else like.new_empty((shares, *like.shape), dtype=torch.float32)


def buffer_of(like: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """A buffer for a gradient. For None an empty tensor like `x`, since an operator must return a tensor."""
    return x.new_empty(0) if like is None else torch.empty_like(like, memory_format=torch.contiguous_format)


def add_shares(
    dweights: torch.Tensor | None,
    dweight: torch.Tensor,
    dbiases: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    """Sums over the shares in one launch and a fixed order: `dweights` (shares, n) into `dweight` (n,), and biases.

    None is skipped.
    """
    given = dweights if dweights is not None else dbiases
    if given is None:
        return
    shares, columns = given.shape
    height = triton.next_power_of_2(shares)
    width = min(256, max(16, 4096 // height))  # 16 columns are 64 bytes, two sectors of memory
    grid = (triton.cdiv(columns, width),)
    warps = warps_of(height * width)
    with on_device_of(given):
        add_kernel[grid](dweights, dbiases, dweight, dbias, shares, columns, height, width, num_warps=warps)


@triton.jit
def add_kernel(dweights, dbiases, dweight, dbias, shares, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    share = tl.arange(0, HEIGHT)[:, None]
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = (share < shares) & (at < columns)[None, :]
    offsets = share * columns + at[None, :]
    if dweights is not None:
        total = tl.sum(tl.load(dweights + offsets, mask=inside, other=0.0), 0)
        tl.store(dweight + at, total.to(dweight.dtype.element_ty), mask=at < columns)
    if dbiases is not None:
        total = tl.sum(tl.load(dbiases + offsets, mask=inside, other=0.0), 0)
        tl.store(dbias + at, total.to(dbias.dtype.element_ty), mask=at < columns)
