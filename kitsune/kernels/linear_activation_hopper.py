"""The two products of linear_activation for Hopper: what follows a tile's products is hidden behind the next tile's.

In bf16 on an H200, for 4096 rows of 768 and 3072 hidden ones with "gelu": forward 50.2 us by linear_activation's own
kernel and 43.6 here, backward 45.2 and 34.6; for 12288 rows 149 and 122, 134 and 98 (benchmarks/results/specialised).
"""

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kitsune.kernels.bias_activation import activated_with_slope
from kitsune.kernels.ping_pong import (
    CONSUMERS,
    DEEP,
    FIRST,
    HIGH,
    PIECE,
    PIECES,
    SECOND,
    STAGES,
    WIDE,
    WORKER_REGISTERS,
    WORKER_WARPS,
    barrier,
    barriers_of,
    launch,
    load_steps,
    load_tiles,
    product_layout,
    read_in_tiles,
    ring_of,
    store_piece,
    stored_in_tiles,
    tiles_of,
    with_products,
)
from kitsune.kernels.products import halves_of, in_rows, joined, place_of, sides

#: Activations with which the forward was measured to be faster than linear_activation's own. With "relu" the assembler
#: would not let products overlap (C7514).
FASTER: Final = ("gelu", "gelu_tanh", "silu")


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, slopes: torch.Tensor, kind: str
) -> None:
    """Into `a` and `slopes` (rows, hidden) what `linear_activation.forward` returns."""
    right, is_transposed = in_rows(weight.t())
    launch(
        forward_kernel,
        a,
        WIDE.value,
        read_in_tiles(x, HIGH.value, DEEP.value),
        read_right(right, is_transposed),
        bias,
        *(stored_in_tiles(result, HIGH.value, PIECE.value) for result in (a, slopes)),
        kind,
        is_transposed,
        x.shape[1],
    )


def backward(
    dy: torch.Tensor, weight: torch.Tensor, slopes: torch.Tensor, dh: torch.Tensor, sums: torch.Tensor
) -> None:
    """Into `dh` (rows, hidden) and `sums` (tiles, hidden) what `linear_activation.backward` returns."""
    right, is_transposed = in_rows(weight)
    launch(
        backward_kernel,
        dh,
        WIDE.value,
        read_in_tiles(dy, HIGH.value, DEEP.value),
        read_right(right, is_transposed),
        read_in_tiles(slopes, HIGH.value, PIECE.value),
        stored_in_tiles(dh, HIGH.value, PIECE.value),
        sums,
        is_transposed,
        dy.shape[1],
    )


def read_right(right: torch.Tensor, is_transposed: bool) -> TensorDescriptor:
    """The right matrix of a product, or its transpose, in the tiles that `load_steps` loads."""
    return read_in_tiles(right, *sides(DEEP.value, WIDE.value, is_transposed))


@gluon.jit(do_not_specialize=["rows"])
def forward_kernel(x, right, bias, a, slopes, KIND: gl.constexpr, IS_TRANSPOSED: gl.constexpr, inner, rows, columns):
    ring = ring_of(x, right, STAGES)
    # Two buffers for each consumer: a piece of `a` and one of `slopes`.
    buffers = gl.allocate_shared_memory(a.dtype, [CONSUMERS * 2, HIGH, PIECE], a.layout)
    gl.warp_specialize(
        [
            (forward_tiles, (FIRST, ring, bias, a, slopes, buffers, rows, columns, inner, KIND, IS_TRANSPOSED)),
            (forward_tiles, (SECOND, ring, bias, a, slopes, buffers, rows, columns, inner, KIND, IS_TRANSPOSED)),
            (load_tiles, (ring, x, right, None, rows, columns, inner, WIDE, IS_TRANSPOSED)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


@gluon.jit
def forward_tiles(
    CONSUMER: gl.constexpr,
    ring,
    bias,
    a,
    slopes,
    buffers,
    rows,
    columns,
    inner,
    KIND: gl.constexpr,
    IS_TRANSPOSED: gl.constexpr,
):
    steps, programs = gl.cdiv(inner, DEEP), gl.num_programs(0)
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_of(rows, columns, WIDE), CONSUMERS * programs):
        number = tile // programs
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        total = with_products(start_of(bias, column, columns), ring, number, steps, CONSUMER, IS_TRANSPOSED)
        store_results(total, a, slopes, buffers, row, column, KIND, CONSUMER * 2, PIECES)
    tma.store_wait(0)


@gluon.jit
def start_of(bias, column, columns):
    """The bias in each row of a tile, to which products are added."""
    layout: gl.constexpr = product_layout(WIDE)
    total = gl.zeros([HIGH, WIDE], gl.float32, layout)
    if bias is not None:
        at = column + gl.arange(0, WIDE, gl.SliceLayout(0, layout))
        total += gl.load(bias + at, mask=at < columns, other=0.0).to(gl.float32)[None, :]
    return total


@gluon.jit
def store_results(
    total, a, slopes, buffers, row, column, KIND: gl.constexpr, BUFFER: gl.constexpr, COUNT: gl.constexpr
):
    """Stores `COUNT` pieces of `a` and of `slopes`, one after the other."""
    if COUNT > 1:
        left, right = halves_of(total)
        store_results(left, a, slopes, buffers, row, column, KIND, BUFFER, COUNT // 2)
        store_results(right, a, slopes, buffers, row, column + COUNT // 2 * PIECE, KIND, BUFFER, COUNT // 2)
    else:
        # By halves, so that all of it stays in registers.
        left, right = halves_of(total)
        one, its_slope = rounded(left, KIND, a.dtype)
        other, other_slope = rounded(right, KIND, a.dtype)
        store_piece(joined(one, other), a, buffers.index(BUFFER), row, column)
        store_piece(joined(its_slope, other_slope), slopes, buffers.index(BUFFER + 1), row, column)


@gluon.jit
def rounded(total, KIND: gl.constexpr, DTYPE: gl.constexpr):
    value, slope = activated_with_slope(total.to(DTYPE).to(gl.float32), KIND)
    return value.to(DTYPE), slope.to(DTYPE)


@gluon.jit(do_not_specialize=["rows"])
def backward_kernel(dy, right, slopes, dh, sums, IS_TRANSPOSED: gl.constexpr, inner, rows, columns):
    ring = ring_of(dy, right, STAGES)
    # For each consumer a tile of slopes, which becomes one of `dh` in its place.
    buffers = gl.allocate_shared_memory(dh.dtype, [CONSUMERS * PIECES, HIGH, PIECE], dh.layout)
    # `ready` and `free` are to a consumer's tile of slopes what `full` and `empty` are to a buffer. The producer waits
    # for a free one after the loads of the tile that needs it, and the tile before, which frees it, precedes those.
    store = (buffers, barriers_of(CONSUMERS), barriers_of(CONSUMERS))
    gl.warp_specialize(
        [
            (backward_tiles, (FIRST, ring, store, dh, sums, rows, columns, inner, IS_TRANSPOSED)),
            (backward_tiles, (SECOND, ring, store, dh, sums, rows, columns, inner, IS_TRANSPOSED)),
            (backward_loads, (ring, store, dy, right, slopes, rows, columns, inner, IS_TRANSPOSED)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


@gluon.jit
def backward_tiles(CONSUMER: gl.constexpr, ring, store, dh, sums, rows, columns, inner, IS_TRANSPOSED: gl.constexpr):
    buffers, ready, free = store
    steps, programs = gl.cdiv(inner, DEEP), gl.num_programs(0)
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_of(rows, columns, WIDE), CONSUMERS * programs):
        number = tile // programs
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        total = gl.zeros([HIGH, WIDE], gl.float32, product_layout(WIDE))
        total = with_products(total, ring, number, steps, CONSUMER, IS_TRANSPOSED)
        mbarrier.wait(ready.index(CONSUMER), number // CONSUMERS & 1)
        store_gradients(
            total, dh, buffers, sums + row // HIGH * columns, row, column, columns, CONSUMER * PIECES, PIECES
        )
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(free.index(CONSUMER))


@gluon.jit
def store_gradients(total, dh, buffers, sums, row, column, columns, BUFFER: gl.constexpr, COUNT: gl.constexpr):
    """Stores a tile of `dh` and its sums, piece by piece. Rows beyond the end are zeros, so they add nothing."""
    if COUNT > 1:
        left, right = halves_of(total)
        beside, at = BUFFER + COUNT // 2, column + COUNT // 2 * PIECE
        store_gradients(left, dh, buffers, sums, row, column, columns, BUFFER, COUNT // 2)
        store_gradients(right, dh, buffers, sums, row, at, columns, beside, COUNT // 2)
    else:
        layout: gl.constexpr = total.type.layout
        buffer = buffers.index(BUFFER)
        value = total * buffer.load(layout).to(gl.float32)
        buffer.store(value.to(dh.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dh, [row, column], buffer)
        at = column + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        gl.store(sums + at, gl.sum(value, axis=0), mask=at < columns)


@gluon.jit
def backward_loads(ring, store, dy, right, slopes, rows, columns, inner, IS_TRANSPOSED: gl.constexpr):
    """The producer. Slopes are loaded after a tile's steps, since they are needed last."""
    steps, programs = gl.cdiv(inner, DEEP), gl.num_programs(0)
    for tile in range(gl.program_id(0), tiles_of(rows, columns, WIDE), programs):
        number = tile // programs
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        load_steps(ring, dy, right, None, row, column, number, steps, IS_TRANSPOSED)
        load_slopes(store, slopes, row, column, number % CONSUMERS, number // CONSUMERS)


@gluon.jit
def load_slopes(store, slopes, row, column, consumer, lap):
    buffers, ready, free = store
    mbarrier.wait(free.index(consumer), lap & 1 ^ 1)
    mbarrier.expect(ready.index(consumer), PIECES * slopes.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        buffer = buffers.index(consumer * PIECES + piece)
        tma.async_copy_global_to_shared(slopes, [row, column + piece * PIECE], ready.index(consumer), buffer)
