"""The products of gated_linear for Hopper: what follows a tile's products is hidden behind those of the next tile.

In bf16 on an H200, for 8192 rows of 768 and 2048 hidden ones with "silu": forward 136 us by gated_linear's own kernel
and 93 here, backward 78 and 60; for 4096 rows of 2048 and 8192 hidden ones 628 and 424, 275 and 240
(benchmarks/results/specialised).
"""

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kitsune.kernels.bias_activation import activated_with_slope
from kitsune.kernels.ping_pong import (
    CONSUMERS,
    DEEP,
    FIRST,
    HIGH,
    PIECE,
    PIECES,
    PLAIN,
    SECOND,
    STAGES,
    TRANSPOSED,
    WIDE,
    WORKER_REGISTERS,
    WORKER_WARPS,
    barrier,
    barriers_of,
    launch,
    load_tiles,
    product_layout,
    read_in_tiles,
    ring_of,
    store_piece,
    stored_in_tiles,
    tiles_of,
    with_products,
)
from kitsune.kernels.products import halves_of, place_of

#: Loads of the backward's second operands have a warp of their own: they wait for stores, and the products must not.
BACKWARD_WARPS: Final = gl.constexpr([4, 1, 1])
BACKWARD_REGISTERS: Final = gl.constexpr([240, 24, 24])
#: Activations with which the forward was measured to be faster than gated_linear's own.
FASTER: Final = ("gelu", "gelu_tanh", "silu")


def forward(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, results: tuple[torch.Tensor, ...], kind: str
) -> None:
    """Into `results`, three of (rows, hidden), what `gated_linear.forward` returns."""
    launch(
        forward_kernel,
        results[0],
        PIECE.value,
        read_in_tiles(x, HIGH.value, DEEP.value),
        *(read_in_tiles(weight, PIECE.value, DEEP.value) for weight in (gate, up)),
        *(stored_in_tiles(result, HIGH.value, PIECE.value) for result in results),
        kind,
        x.shape[1],
    )


def backward(
    dy: torch.Tensor, down: torch.Tensor, activation: torch.Tensor, slopes: torch.Tensor, both: torch.Tensor
) -> None:
    """Into `both` (rows, 2 * hidden) what `gated_linear.backward` returns."""
    launch(
        backward_kernel,
        slopes,
        WIDE.value,
        read_in_tiles(dy, HIGH.value, DEEP.value),
        read_in_tiles(down, DEEP.value, WIDE.value),
        *(read_in_tiles(factor, HIGH.value, PIECE.value) for factor in (slopes, activation)),
        *(stored_in_tiles(half, HIGH.value, PIECE.value) for half in both.chunk(2, dim=1)),
        dy.shape[1],
    )


@gluon.jit(do_not_specialize=["rows"])
def forward_kernel(x, gate, up, hidden, activation, slopes, KIND: gl.constexpr, inner, rows, columns):
    # A tile of the results is as wide as a piece. Its consumer computes both products as one of twice the width.
    halved = ring_of(x, gate, 2 * STAGES)
    lefts, halves, full, empty, passed = halved
    rights = halves._reinterpret(gate.dtype, [STAGES, WIDE, DEEP], gate.layout)
    ring = (lefts, rights, full, empty, passed)
    buffers = gl.allocate_shared_memory(hidden.dtype, [CONSUMERS * 2, HIGH, PIECE], hidden.layout)
    gl.warp_specialize(
        [
            (forward_tiles, (FIRST, ring, hidden, activation, slopes, buffers, rows, columns, inner, KIND)),
            (forward_tiles, (SECOND, ring, hidden, activation, slopes, buffers, rows, columns, inner, KIND)),
            (load_tiles, (halved, x, gate, up, rows, columns, inner, PIECE, TRANSPOSED)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


@gluon.jit
def forward_tiles(
    CONSUMER: gl.constexpr, ring, hidden, activation, slopes, buffers, rows, columns, inner, KIND: gl.constexpr
):
    steps, programs = gl.cdiv(inner, DEEP), gl.num_programs(0)
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_of(rows, columns, PIECE), CONSUMERS * programs):
        number = tile // programs
        row, column = place_of(tile, rows, columns, HIGH, PIECE)
        total = gl.zeros([HIGH, WIDE], gl.float32, product_layout(WIDE))
        gated, linear = halves_of(with_products(total, ring, number, steps, CONSUMER, True))
        value, slope = activated_with_slope(gated.to(hidden.dtype).to(gl.float32), KIND)
        factor = linear.to(hidden.dtype).to(gl.float32)
        # Two buffers, and three stores a tile, so the buffer of the first one alternates.
        turn = number // CONSUMERS & 1
        one, other = buffers.index(CONSUMER * 2 + turn), buffers.index(CONSUMER * 2 + 1 - turn)
        store_piece((value * factor).to(hidden.dtype), hidden, one, row, column)
        store_piece(value.to(hidden.dtype), activation, other, row, column)
        store_piece((slope * factor).to(hidden.dtype), slopes, one, row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def backward_kernel(dy, down, slopes, activation, dgate, dup, inner, rows, columns):
    ring = ring_of(dy, down, STAGES)
    # For each consumer a piece of slopes and one of the activation, which become those of `dgate` and `dup`.
    buffers = gl.allocate_shared_memory(dgate.dtype, [CONSUMERS * 2, HIGH, PIECE], dgate.layout)
    # `ready` and `free` are to a consumer's pieces what `full` and `empty` are to a buffer.
    store = (buffers, barriers_of(CONSUMERS), barriers_of(CONSUMERS))
    gl.warp_specialize(
        [
            (backward_tiles, (FIRST, ring, store, dgate, dup, rows, columns, inner)),
            (backward_tiles, (SECOND, ring, store, dgate, dup, rows, columns, inner)),
            (load_tiles, (ring, dy, down, None, rows, columns, inner, WIDE, PLAIN)),
            (load_factors, (store, slopes, activation, rows, columns)),
        ],
        BACKWARD_WARPS,
        BACKWARD_REGISTERS,
    )


@gluon.jit
def backward_tiles(CONSUMER: gl.constexpr, ring, store, dgate, dup, rows, columns, inner):
    steps, programs = gl.cdiv(inner, DEEP), gl.num_programs(0)
    for tile in range(gl.program_id(0) + CONSUMER * programs, tiles_of(rows, columns, WIDE), CONSUMERS * programs):
        number = tile // programs
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        total = gl.zeros([HIGH, WIDE], gl.float32, product_layout(WIDE))
        left, right = halves_of(with_products(total, ring, number, steps, CONSUMER, False))
        lap = number // CONSUMERS * PIECES
        store_gradients(left, store, dgate, dup, row, column, CONSUMER, lap)
        store_gradients(right, store, dgate, dup, row, column + PIECE, CONSUMER, lap + 1)


@gluon.jit
def store_gradients(total, store, dgate, dup, row, column, CONSUMER: gl.constexpr, lap):
    """Stores a piece of `dgate` and of `dup`, in the place of their factors."""
    buffers, ready, free = store
    layout: gl.constexpr = total.type.layout
    gates, ups = buffers.index(CONSUMER * 2), buffers.index(CONSUMER * 2 + 1)
    mbarrier.wait(ready.index(CONSUMER), lap & 1)
    dgated = (total * gates.load(layout).to(gl.float32)).to(dgate.dtype)
    dlinear = (total * ups.load(layout).to(gl.float32)).to(dup.dtype)
    gates.store(dgated)
    ups.store(dlinear)
    fence_async_shared()
    tma.async_copy_shared_to_global(dgate, [row, column], gates)
    tma.async_copy_shared_to_global(dup, [row, column], ups)
    tma.store_wait(0)
    barrier()
    mbarrier.arrive(free.index(CONSUMER))


@gluon.jit
def load_factors(store, slopes, activation, rows, columns):
    """Loads the factors of each piece, in the order in which the consumers need them."""
    buffers, ready, free = store
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0), tiles_of(rows, columns, WIDE), programs):
        number = tile // programs
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        consumer = number % CONSUMERS
        for piece in gl.static_range(PIECES):
            lap = number // CONSUMERS * PIECES + piece
            place = [row, column + piece * PIECE]
            mbarrier.wait(free.index(consumer), lap & 1 ^ 1)
            mbarrier.expect(ready.index(consumer), 2 * slopes.block_type.nbytes)
            tma.async_copy_global_to_shared(slopes, place, ready.index(consumer), buffers.index(consumer * 2))
            tma.async_copy_global_to_shared(activation, place, ready.index(consumer), buffers.index(consumer * 2 + 1))
