"""Suite specialised: the two products of linear_activation with warps of their own for loads, beside kitsune's kernels.

    python -m benchmarks.specialised_products
    python -m benchmarks.specialised_products --rows 4096 --only forward

One warp loads tiles into a ring of buffers in shared memory, and two groups of four warps, the consumers, multiply.
Either they take turns: each has a tile of the result of its own, and stores it while the other multiplies. Or they
share: their tiles lie below each other, so that the weight is loaded once for both; then what the epilogue takes is
hidden only as far as one consumer may be ahead of the other, by the length of the ring. Or, in the forward, they share
and relay: four more warps take the rounded products from shared memory, and apply the activation to them.

With an inner size of 768 the epilogue of the forward takes half as long as its products, so it should be hidden: taking
turns and relaying do. But tiles of 128 x 128 read 64 bytes from L2 for each clock in which the tensor cores are busy,
and shared ones 48 bytes; which of the two counts for more is what this suite measures. Tiles of 64 x 256 read as much
as 128 x 128 where they are shared, and less from shared memory.
"""

# Constants of Triton are in capitals; it knows neither enumerate nor the unpacking of a list.
# ruff: noqa: N803, N806, RUF005, SIM113

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks import results_file
from benchmarks.kernel_runs import Run
from benchmarks.kernels import keep, race
from benchmarks.training_step import DEVICE
from kitsune.kernels import linear_activation
from kitsune.kernels.launch import bind_context, on_device_of
from kitsune.kernels.linear_activation import activated_with_slope, halves_of, multiprocessors_of, place_of

#: Columns that are stored at once: 128 bytes, the widest swizzle.
PIECE: Final = gl.constexpr(64)
#: Warps of a consumer: the four that one wgmma needs.
WARPS: Final = 4
#: Of a thread that only loads.
PRODUCER_REGISTERS: Final = gl.constexpr(24)

ROWS: Final = (2048, 4096, 12288, 12608)
INNER: Final = 768
HIDDEN: Final = 3072


class Variant(NamedTuple):
    """Each of the consumers computes tiles of `high` x `wide`, from a ring of `stages` buffers `deep` products long.

    They share the weight's tiles if `is_shared`, and take turns otherwise; if `is_relayed` they share, and other warps
    apply the activation. A thread of theirs has `registers`.
    """

    high: int
    wide: int
    deep: int
    stages: int
    consumers: int
    is_shared: bool
    registers: int
    is_relayed: bool = False

    @property
    def block_high(self) -> int:
        """Rows of the result that a program computes at once, from one tile of the weight."""
        return self.high * (self.consumers if self.is_shared else 1)

    @property
    def name(self) -> str:
        how = "relayed" if self.is_relayed else "shared" if self.is_shared else "turns"
        return f"{how}-{self.consumers}x{self.high}x{self.wide}x{self.deep}-s{self.stages}"


FORWARD: Final = (
    Variant(high=128, wide=128, deep=64, stages=5, consumers=2, is_shared=False, registers=240),
    Variant(high=128, wide=128, deep=128, stages=2, consumers=2, is_shared=False, registers=240),
    Variant(high=64, wide=256, deep=64, stages=4, consumers=2, is_shared=False, registers=240),
    Variant(high=64, wide=256, deep=64, stages=4, consumers=2, is_shared=True, registers=240),
    Variant(high=128, wide=128, deep=64, stages=3, consumers=2, is_shared=True, registers=240),
    Variant(high=64, wide=256, deep=64, stages=3, consumers=2, is_shared=True, registers=184, is_relayed=True),
)
BACKWARD: Final = (
    Variant(high=128, wide=128, deep=64, stages=5, consumers=2, is_shared=False, registers=240),
    Variant(high=128, wide=128, deep=128, stages=2, consumers=2, is_shared=False, registers=240),
    Variant(high=64, wide=256, deep=64, stages=4, consumers=2, is_shared=False, registers=240),
    Variant(high=64, wide=256, deep=64, stages=3, consumers=2, is_shared=True, registers=240),
    Variant(high=128, wide=128, deep=64, stages=3, consumers=2, is_shared=True, registers=240),
    Variant(high=128, wide=128, deep=32, stages=6, consumers=2, is_shared=True, registers=240),
)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `linear_activation.forward` computes. The bias is added before the products, not after them."""
    a = x.new_empty(len(x), len(weight))
    slopes = torch.empty_like(a)
    launch(
        relayed_kernel if variant.is_relayed else forward_kernel,
        variant,
        a,
        described(x, variant.high, variant.deep),
        described(weight, variant.wide, variant.deep),
        bias,
        described(a, variant.high, PIECE.value),
        described(slopes, variant.high, PIECE.value),
        *a.shape,
        x.shape[1],
        kind,
    )
    return a, slopes


def backward(
    dy: torch.Tensor, weight: torch.Tensor, slopes: torch.Tensor, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `linear_activation.backward` computes, with one row of sums for each `variant.high` rows."""
    dh = torch.empty_like(slopes)
    sums = slopes.new_empty(triton.cdiv(len(slopes), variant.high), slopes.shape[1], dtype=torch.float32)
    launch(
        backward_kernel,
        variant,
        dh,
        described(dy, variant.high, variant.deep),
        described(weight, variant.deep, variant.wide),
        described(slopes, variant.high, PIECE.value),
        described(dh, variant.high, PIECE.value),
        sums,
        *dh.shape,
        dy.shape[1],
    )
    return dh, sums


def described(matrix: torch.Tensor, high: int, wide: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [high, wide], layout_of(high, wide))


def layout_of(high: int, wide: int) -> gl.NVMMASharedLayout:
    """How a tile of a half precision lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([high, wide], gl.bfloat16)


def launch(kernel: Any, variant: Variant, result: torch.Tensor, *given: Any) -> None:
    """Runs a kernel with a program for each multiprocessor, each of which computes block after block."""
    rows, columns = result.shape
    blocks = triton.cdiv(rows, variant.block_high) * triton.cdiv(columns, variant.wide)
    programs = min(blocks, multiprocessors_of(result.device))
    with on_device_of(result):
        bind_context(result.device)
        kernel[(programs,)](*given, *variant[:-1], num_warps=WARPS)


# How the warps wait for each other.
#
# The blocks of a program are numbered 0, 1, ...; each needs `steps` loads, and load n goes into buffer n % STAGES, as
# number n // STAGES of its laps. Producer and consumers count the same loads, so nothing but barriers is exchanged.
#
# `full[s]` completes once for each lap of buffer s: the producer arrives with the bytes it expects, and the bytes come.
# A consumer reads lap k after phase k of it, of parity k % 2. `empty[s]` completes when those who read a lap have
# arrived: one consumer that takes turns, or all that share. Before lap k the producer waits for phase k - 1 of it; for
# k = 0 that is the phase before a new barrier's first one, which counts as complete.
#
# A parity tells a phase from its neighbours only, so nobody may wait for a phase before the one before it is complete,
# nor still wait when the one after it completes. The latter holds since lap k + 1 is loaded only after all who read lap
# k have arrived, thus after they have passed their wait for it. The former holds for consumers that share, and for the
# producer, as each waits for every lap. Of those that take turns each skips the blocks of the others, so it begins
# block n only when `passed` of the one before tells that it has passed all waits of block n - 1. That barrier
# completes for each of its blocks once; who waits for it has waited for the time before, and lets the next come.
#
# In the backward `ready[c]` and `free[c]` are the same for the one buffer of slopes of consumer c, with its tiles for
# laps. A consumer waits for slopes only after its products, and the producer for a free buffer only after the loads of
# the block whose slopes it brings; that buffer is freed by the consumer's tile before, whose loads precede those. So
# every wait is for what comes earlier in the order of blocks, and there is no circle.
#
# Where results are relayed, `ready[c]` and `free[c]` are those of the buffer of results of consumer c: it waits for a
# free one after its products, and the warps that store wait for a ready one, of each consumer in turn. They free it
# without waiting for anything but their own stores, so there is no circle either.


@gluon.jit(do_not_specialize=["rows"])
def forward_kernel(
    x,
    weight,
    bias,
    a,
    slopes,
    rows,
    columns,
    inner,
    KIND: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    gl.static_assert(CONSUMERS == 2)
    PARTS: gl.constexpr = CONSUMERS if IS_SHARED else 1
    ring = ring_of(x, weight, STAGES, PARTS, CONSUMERS)
    # Two buffers for each consumer: a piece of `a` and one of `slopes`.
    buffers = gl.allocate_shared_memory(a.dtype, [CONSUMERS * 2, HIGH, PIECE], a.layout)
    sizes = (rows, columns, inner)
    out = (a, slopes, buffers)
    gl.warp_specialize(
        [
            (forward_first, (ring, bias, out, sizes, KIND, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)),
            (forward_second, (ring, bias, out, sizes, KIND, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)),
            (forward_loads, (ring, x, weight, sizes, HIGH, WIDE, DEEP, STAGES, PARTS)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def forward_first(
    ring,
    bias,
    out,
    sizes,
    KIND: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    forward_tiles(0, ring, bias, out, sizes, KIND, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)


@gluon.jit
def forward_second(
    ring,
    bias,
    out,
    sizes,
    KIND: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    forward_tiles(1, ring, bias, out, sizes, KIND, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)


@gluon.jit
def forward_tiles(
    PART: gl.constexpr,
    ring,
    bias,
    out,
    sizes,
    KIND: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    """Consumer `PART` of the forward."""
    rows, columns, inner = sizes
    PARTS: gl.constexpr = CONSUMERS if IS_SHARED else 1
    PITCH: gl.constexpr = 1 if IS_SHARED else CONSUMERS
    steps = gl.cdiv(inner, DEEP)
    programs = gl.num_programs(0)
    number = 0 if IS_SHARED else PART
    first = gl.program_id(0) + number * programs
    for block in range(first, blocks_of(rows, columns, HIGH * PARTS, WIDE), PITCH * programs):
        row, column = place_of(block, rows, columns, HIGH * PARTS, WIDE)
        row += PART * HIGH if IS_SHARED else 0
        total = start_of(bias, column, columns, HIGH, WIDE, product_layout(WIDE))
        total = with_products(total, ring, number, steps, PART, CONSUMERS, IS_SHARED, STAGES, True)
        store_results(total, out, row, column, KIND, PART * 2, WIDE // PIECE)
        number += PITCH
    tma.store_wait(0)


@gluon.jit
def start_of(bias, column, columns, HIGH: gl.constexpr, WIDE: gl.constexpr, layout: gl.constexpr):
    """The bias in each row of a tile, to which products are added."""
    total = gl.zeros([HIGH, WIDE], gl.float32, layout)
    if bias is not None:
        at = column + gl.arange(0, WIDE, gl.SliceLayout(0, layout))
        total += gl.load(bias + at, mask=at < columns, other=0.0).to(gl.float32)[None, :]
    return total


@gluon.jit
def store_results(total, out, row, column, KIND: gl.constexpr, BUFFER: gl.constexpr, PIECES: gl.constexpr):
    """Stores a tile of `a` and of `slopes`, piece by piece."""
    if PIECES > 1:
        left, right = halves_of(total)
        store_results(left, out, row, column, KIND, BUFFER, PIECES // 2)
        store_results(right, out, row, column + PIECES // 2 * PIECE, KIND, BUFFER, PIECES // 2)
    else:
        a, slopes, buffers = out
        value, slope = activated_with_slope(total.to(a.dtype).to(gl.float32), KIND)
        store_piece(value.to(a.dtype), a, buffers.index(BUFFER), row, column)
        store_piece(slope.to(slopes.dtype), slopes, buffers.index(BUFFER + 1), row, column)


@gluon.jit
def store_piece(value, target, buffer, row, column):
    """Stores through one of two buffers in turns, thus the last but one store has read what is overwritten here."""
    tma.store_wait(1)
    buffer.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [row, column], buffer)


@gluon.jit
def forward_loads(
    ring,
    x,
    weight,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The producer of the forward."""
    rows, columns, inner = sizes
    steps = gl.cdiv(inner, DEEP)
    number = 0
    for block in range(gl.program_id(0), blocks_of(rows, columns, HIGH * PARTS, WIDE), gl.num_programs(0)):
        row, column = place_of(block, rows, columns, HIGH * PARTS, WIDE)
        load_steps(ring, x, weight, row, column, number * steps, steps, HIGH, DEEP, STAGES, PARTS, True)
        number += 1


@gluon.jit(do_not_specialize=["rows"])
def relayed_kernel(
    x,
    weight,
    bias,
    a,
    slopes,
    rows,
    columns,
    inner,
    KIND: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """The forward, where other warps than the consumers apply the activation."""
    gl.static_assert(CONSUMERS == 2 and IS_SHARED)
    ring = ring_of(x, weight, STAGES, CONSUMERS, CONSUMERS)
    # For each consumer a tile of results before the activation, which becomes one of `a` in its place.
    results = gl.allocate_shared_memory(a.dtype, [CONSUMERS * (WIDE // PIECE), HIGH, PIECE], a.layout)
    buffers = gl.allocate_shared_memory(slopes.dtype, [2, HIGH, PIECE], slopes.layout)
    store = (results, barriers_of(CONSUMERS, 1), barriers_of(CONSUMERS, 1))
    sizes = (rows, columns, inner)
    gl.warp_specialize(
        [
            (relayed_stores, (store, buffers, a, slopes, sizes, KIND, HIGH, WIDE, CONSUMERS)),
            (relayed_first, (ring, store, bias, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS)),
            (relayed_second, (ring, store, bias, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS)),
            (forward_loads, (ring, x, weight, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def relayed_first(
    ring,
    store,
    bias,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    relayed_tiles(0, ring, store, bias, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS)


@gluon.jit
def relayed_second(
    ring,
    store,
    bias,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    relayed_tiles(1, ring, store, bias, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS)


@gluon.jit
def relayed_tiles(
    PART: gl.constexpr,
    ring,
    store,
    bias,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Consumer `PART` of the relayed forward."""
    rows, columns, inner = sizes
    results, ready, free = store
    steps = gl.cdiv(inner, DEEP)
    number = 0
    for block in range(gl.program_id(0), blocks_of(rows, columns, HIGH * CONSUMERS, WIDE), gl.num_programs(0)):
        _, column = place_of(block, rows, columns, HIGH * CONSUMERS, WIDE)
        total = start_of(bias, column, columns, HIGH, WIDE, product_layout(min(WIDE, 128)))
        total = with_products(total, ring, number, steps, PART, CONSUMERS, True, STAGES, True)
        mbarrier.wait(free.index(PART), number & 1 ^ 1)
        hand_over(total.to(results.dtype), results, PART * (WIDE // PIECE), WIDE // PIECE)
        gl.thread_barrier()
        mbarrier.arrive(ready.index(PART))
        number += 1


@gluon.jit
def hand_over(total, results, BUFFER: gl.constexpr, PIECES: gl.constexpr):
    if PIECES > 1:
        left, right = halves_of(total)
        hand_over(left, results, BUFFER, PIECES // 2)
        hand_over(right, results, BUFFER + PIECES // 2, PIECES // 2)
    else:
        results.index(BUFFER).store(total)


@gluon.jit
def relayed_stores(
    store,
    buffers,
    a,
    slopes,
    sizes,
    KIND: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """What the other warps do: they store the tiles of each consumer in turn.

    A piece takes two stores, and pieces take the two buffers of slopes in turns. So before a buffer is overwritten all
    but the two stores of the piece before must have read; and after the last piece, all but that of its slopes.
    """
    rows, columns, _ = sizes
    results, ready, free = store
    PIECES: gl.constexpr = WIDE // PIECE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    number = 0
    for block in range(gl.program_id(0), blocks_of(rows, columns, HIGH * CONSUMERS, WIDE), gl.num_programs(0)):
        row, column = place_of(block, rows, columns, HIGH * CONSUMERS, WIDE)
        for part in gl.static_range(CONSUMERS):
            mbarrier.wait(ready.index(part), number & 1)
            for piece in gl.static_range(PIECES):
                result, buffer = results.index(part * PIECES + piece), buffers.index(piece % 2)
                place = [row + part * HIGH, column + piece * PIECE]
                value, slope = activated_with_slope(result.load(layout).to(gl.float32), KIND)
                tma.store_wait(2)
                result.store(value.to(a.dtype))
                buffer.store(slope.to(slopes.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(a, place, result)
                tma.async_copy_shared_to_global(slopes, place, buffer)
            tma.store_wait(1)
            gl.thread_barrier()
            mbarrier.arrive(free.index(part))
        number += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy,
    weight,
    slopes,
    dh,
    sums,
    rows,
    columns,
    inner,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    gl.static_assert(CONSUMERS == 2)
    PARTS: gl.constexpr = CONSUMERS if IS_SHARED else 1
    ring = ring_of(dy, weight, STAGES, PARTS, CONSUMERS)
    # For each consumer a tile of slopes, which becomes one of `dh` in its place.
    buffers = gl.allocate_shared_memory(dh.dtype, [CONSUMERS * (WIDE // PIECE), HIGH, PIECE], dh.layout)
    ready, free = barriers_of(CONSUMERS, 1), barriers_of(CONSUMERS, 1)
    sizes = (rows, columns, inner)
    store = (buffers, ready, free)
    gl.warp_specialize(
        [
            (backward_first, (ring, store, dh, sums, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)),
            (backward_second, (ring, store, dh, sums, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)),
            (
                backward_loads,
                (ring, store, dy, weight, slopes, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED),
            ),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def backward_first(
    ring,
    store,
    dh,
    sums,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    backward_tiles(0, ring, store, dh, sums, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)


@gluon.jit
def backward_second(
    ring,
    store,
    dh,
    sums,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    backward_tiles(1, ring, store, dh, sums, sizes, HIGH, WIDE, DEEP, STAGES, CONSUMERS, IS_SHARED)


@gluon.jit
def backward_tiles(
    PART: gl.constexpr,
    ring,
    store,
    dh,
    sums,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    """Consumer `PART` of the backward."""
    rows, columns, inner = sizes
    buffers, ready, free = store
    PARTS: gl.constexpr = CONSUMERS if IS_SHARED else 1
    PITCH: gl.constexpr = 1 if IS_SHARED else CONSUMERS
    PIECES: gl.constexpr = WIDE // PIECE
    steps = gl.cdiv(inner, DEEP)
    programs = gl.num_programs(0)
    number = 0 if IS_SHARED else PART
    first = gl.program_id(0) + number * programs
    for block in range(first, blocks_of(rows, columns, HIGH * PARTS, WIDE), PITCH * programs):
        row, column = place_of(block, rows, columns, HIGH * PARTS, WIDE)
        row += PART * HIGH if IS_SHARED else 0
        total = gl.zeros([HIGH, WIDE], gl.float32, product_layout(WIDE))
        total = with_products(total, ring, number, steps, PART, CONSUMERS, IS_SHARED, STAGES, False)
        mbarrier.wait(ready.index(PART), number // PITCH & 1)
        # A tile of rows that are all beyond the end has no sums.
        end = gl.where(row < rows, columns, 0)
        store_gradients(total, dh, buffers, sums + row // HIGH * columns, row, column, end, PART * PIECES, PIECES)
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.arrive(free.index(PART))
        number += PITCH


@gluon.jit
def store_gradients(total, dh, buffers, sums, row, column, end, BUFFER: gl.constexpr, PIECES: gl.constexpr):
    """Stores a tile of `dh` and its sums, piece by piece. Rows beyond the end are zeros, so they add nothing."""
    if PIECES > 1:
        HALF: gl.constexpr = PIECES // 2
        left, right = halves_of(total)
        store_gradients(left, dh, buffers, sums, row, column, end, BUFFER, HALF)
        store_gradients(right, dh, buffers, sums, row, column + HALF * PIECE, end, BUFFER + HALF, HALF)
    else:
        layout: gl.constexpr = total.type.layout
        buffer = buffers.index(BUFFER)
        value = total * buffer.load(layout).to(gl.float32)
        buffer.store(value.to(dh.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dh, [row, column], buffer)
        at = column + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        gl.store(sums + at, gl.sum(value, axis=0), mask=at < end)


@gluon.jit
def backward_loads(
    ring,
    store,
    dy,
    weight,
    slopes,
    sizes,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    """The producer of the backward. Slopes are loaded after the block's steps: they are needed last."""
    rows, columns, inner = sizes
    PARTS: gl.constexpr = CONSUMERS if IS_SHARED else 1
    PIECES: gl.constexpr = WIDE // PIECE
    steps = gl.cdiv(inner, DEEP)
    number = 0
    for block in range(gl.program_id(0), blocks_of(rows, columns, HIGH * PARTS, WIDE), gl.num_programs(0)):
        row, column = place_of(block, rows, columns, HIGH * PARTS, WIDE)
        load_steps(ring, dy, weight, row, column, number * steps, steps, HIGH, DEEP, STAGES, PARTS, False)
        for part in gl.static_range(PARTS):
            if IS_SHARED:
                load_slopes(store, slopes, row + part * HIGH, column, part, number, PIECES)
            else:
                load_slopes(store, slopes, row, column, number % CONSUMERS, number // CONSUMERS, PIECES)
        number += 1


@gluon.jit
def load_slopes(store, slopes, row, column, consumer, lap, PIECES: gl.constexpr):
    buffers, ready, free = store
    mbarrier.wait(free.index(consumer), lap & 1 ^ 1)
    mbarrier.expect(ready.index(consumer), PIECES * slopes.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(
            slopes, [row, column + piece * PIECE], ready.index(consumer), buffers.index(consumer * PIECES + piece)
        )


@gluon.jit
def ring_of(left, right, STAGES: gl.constexpr, PARTS: gl.constexpr, CONSUMERS: gl.constexpr):
    """(buffers of `PARTS` tiles of `left` each, of a tile of `right`, their full barriers, empty ones, `passed`)."""
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES * PARTS] + left.block_shape, left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [STAGES] + right.block_shape, right.layout)
    return lefts, rights, barriers_of(STAGES, 1), barriers_of(STAGES, PARTS), barriers_of(CONSUMERS, 1)


@gluon.jit
def barriers_of(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    fence_async_shared()  # the tensor memory accelerator arrives at them too
    return barriers


@gluon.jit
def blocks_of(rows, columns, HIGH: gl.constexpr, WIDE: gl.constexpr):
    return gl.cdiv(rows, HIGH) * gl.cdiv(columns, WIDE)


@gluon.jit
def load_steps(
    ring,
    left,
    right,
    row,
    column,
    begin,
    steps,
    HIGH: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    IS_TRANSPOSED: gl.constexpr,
):
    """Loads what a block needs, as loads `begin`, `begin` + 1, ... of the ring."""
    lefts, rights, full, empty, _ = ring
    stage, parity = begin % STAGES, begin // STAGES & 1
    for step in range(steps):
        at = step * DEEP
        mbarrier.wait(empty.index(stage), parity ^ 1)
        mbarrier.expect(full.index(stage), PARTS * left.block_type.nbytes + right.block_type.nbytes)
        for part in gl.static_range(PARTS):
            place = [row + part * HIGH, at]
            tma.async_copy_global_to_shared(left, place, full.index(stage), lefts.index(stage * PARTS + part))
        if IS_TRANSPOSED:
            tma.async_copy_global_to_shared(right, [column, at], full.index(stage), rights.index(stage))
        else:
            tma.async_copy_global_to_shared(right, [at, column], full.index(stage), rights.index(stage))
        stage, parity = following(stage, parity, STAGES)


@gluon.jit
def with_products(
    total,
    ring,
    number,
    steps,
    PART: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_SHARED: gl.constexpr,
    STAGES: gl.constexpr,
    IS_TRANSPOSED: gl.constexpr,
):
    """Adds the products of block `number`, by consumer `PART`.

    A buffer is given back when the products of the next one have begun, so that the tensor cores never wait for it.
    Each warp waits only for its own products, hence the barrier of them all before one thread arrives for them.
    """
    lefts, rights, full, empty, passed = ring
    PARTS: gl.constexpr = CONSUMERS if IS_SHARED else 1
    LEFT: gl.constexpr = PART if IS_SHARED else 0
    if not IS_SHARED:
        mbarrier.wait(passed.index((PART + CONSUMERS - 1) % CONSUMERS), (number - 1) // CONSUMERS & 1, pred=number > 0)
    begin = number * steps
    stage, parity = begin % STAGES, begin // STAGES & 1
    for step in range(steps):
        mbarrier.wait(full.index(stage), parity)
        right = rights.index(stage)
        if IS_TRANSPOSED:
            right = right.permute((1, 0))
        total = warpgroup_mma(lefts.index(stage * PARTS + LEFT), right, total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(preceding(stage, STAGES)), pred=step > 0)
        stage, parity = following(stage, parity, STAGES)
    if not IS_SHARED:
        mbarrier.arrive(passed.index(PART))
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    gl.thread_barrier()
    mbarrier.arrive(empty.index(preceding(stage, STAGES)))
    return total


@gluon.jit
def preceding(stage, STAGES: gl.constexpr):
    """The stage before a stage. Triton 3.6 would not carry a variable that begins as an equal of `stage`."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def following(stage, parity, STAGES: gl.constexpr):
    """The stage after a stage, and the parity of its lap."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, parity ^ 1, parity)


@gluon.constexpr_function
def product_layout(wide):
    """How a warpgroup holds a tile that it computes `wide` columns at once.

    With 16 warps these are at most 128: the assembler holds one instruction to the 128 registers that they begin with.
    """
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, wide, 16])


def forward_builds(rows: int, kind: str) -> dict[str, Callable[[], Run]]:
    """Arm -> what makes its run, checked against kitsune's."""
    torch.manual_seed(0)
    x = drawn(rows, INNER)
    weight, bias = drawn(HIDDEN, INNER) / INNER**0.5, drawn(HIDDEN)
    expected = linear_activation.forward(x, weight, bias, kind)

    def specialised(variant: Variant) -> Run:
        for some_bias, told in ((bias, expected), (None, linear_activation.forward(x, weight, None, kind))):
            check(forward(x, weight, some_bias, kind, variant), told)
        check_repeated(lambda: forward(x, weight, bias, kind, variant))
        return lambda: forward(x, weight, bias, kind, variant)

    return {
        "product": lambda: lambda: (torch.addmm(bias, x, weight.t()),),
        "kitsune": lambda: lambda: linear_activation.forward(x, weight, bias, kind),
        **{variant.name: partial(specialised, variant) for variant in FORWARD},
    }


def backward_builds(rows: int) -> dict[str, Callable[[], Run]]:
    """Arm -> what makes its run, checked against kitsune's."""
    torch.manual_seed(0)
    dy, slopes = drawn(rows, INNER), drawn(rows, HIDDEN)
    weight = drawn(INNER, HIDDEN) / INNER**0.5
    dh, sums = linear_activation.backward(dy, weight, slopes)

    def specialised(variant: Variant) -> Run:
        got_dh, got_sums = backward(dy, weight, slopes, variant)
        per_tile = linear_activation.BACKWARD.high // variant.high
        padded = torch.nn.functional.pad(got_sums, (0, 0, 0, len(sums) * per_tile - len(got_sums)))
        check((got_dh, padded.view(len(sums), per_tile, -1).sum(1)), (dh, sums))
        check_repeated(lambda: backward(dy, weight, slopes, variant))
        return lambda: backward(dy, weight, slopes, variant)

    return {
        "product": lambda: lambda: (dy @ weight,),
        "kitsune": lambda: lambda: linear_activation.backward(dy, weight, slopes),
        **{variant.name: partial(specialised, variant) for variant in BACKWARD},
    }


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def check(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Raises AssertionError unless they are as near as roundings of bf16 allow."""
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def check_repeated(run: Run) -> None:
    """Raises AssertionError unless runs are bitwise equal. More of them also find races that one does not."""
    first = run()
    for _ in range(20):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True)), "runs differ"


def races(only: list[str], rows: list[int], kind: str, rounds: int) -> Iterator[Iterator[dict[str, object]]]:
    for count in rows:
        shape = f"{count}x{INNER}-{HIDDEN}/bf16"
        if "forward" in only:
            yield race("specialised", f"forward/{kind}/{shape}", partial(forward_builds, count, kind), rounds)
        if "backward" in only:
            yield race("specialised", f"backward/{shape}", partial(backward_builds, count), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--kind", default="gelu", choices=["gelu", "gelu_tanh", "silu", "relu"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    cases = races(arguments.only, arguments.rows, arguments.kind, arguments.rounds)
    keep(arguments.out or results_file.free_path("specialised"), cases)


if __name__ == "__main__":
    main()
