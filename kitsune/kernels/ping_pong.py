"""Products of matrices whose two consumers take turns ("ping-pong" in CUTLASS), in Gluon for Hopper.

One warp, the producer, loads tiles into a ring of buffers in shared memory. Two groups of four warps, the consumers,
each compute tiles of the result of their own: while one does to its tile what follows the products, and stores it, the
other has the tensor cores. With an inner size of 768 what follows takes half as long as the products.

On an H200 it was faster than consumers that share the loads of a weight, and than Triton's own pipeline: see
benchmarks/results/specialised.
"""

from typing import Any, Final

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

from kitsune.kernels.launch import bind_context, on_device_of
from kitsune.kernels.products import multiprocessors_of, place_of, readable

#: Rows and columns of a tile of the result, and products of each at once. With 5 buffers in the ring it was the fastest
#: of three tilings; 64 x 256 was as fast with 2048 rows.
HIGH: Final = gl.constexpr(128)
WIDE: Final = gl.constexpr(128)
DEEP: Final = gl.constexpr(64)
STAGES: Final = gl.constexpr(5)
CONSUMERS: Final = gl.constexpr(2)
FIRST: Final = gl.constexpr(0)
SECOND: Final = gl.constexpr(1)
#: Of a weight (columns, inner) and of one (inner, columns).
TRANSPOSED: Final = gl.constexpr(True)
PLAIN: Final = gl.constexpr(False)
#: Columns that are stored at once: 128 bytes of a half precision, the widest swizzle.
PIECE: Final = gl.constexpr(64)
PIECES: Final = gl.constexpr(WIDE.value // PIECE.value)
#: The four that one wgmma needs.
WARPS_OF_CONSUMER: Final = 4
WORKER_WARPS: Final = gl.constexpr([WARPS_OF_CONSUMER, 1])
#: Of a thread of the second consumer, and of the producer; the first consumer gets what is left, which is as much.
WORKER_REGISTERS: Final = gl.constexpr([240, 24])
#: Triton 3.7 has renamed it.
barrier: Final = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# How the warps wait for each other.
#
# The tiles of a program are numbered 0, 1, ...; each needs `steps` loads, and load n goes into buffer n % STAGES, as
# number n // STAGES of its laps. Producer and consumers count the same loads, so nothing but barriers is exchanged.
#
# `full[s]` completes once for each lap of buffer s: the producer arrives with the bytes it expects, and the bytes come.
# A consumer reads lap k after phase k of it, of parity k % 2. `empty[s]` completes when the consumer that reads a lap
# has arrived. Before lap k the producer waits for phase k - 1 of it; for k = 0 that is the phase before a new barrier's
# first one, which counts as complete.
#
# A parity tells a phase from its neighbours only, so nobody may wait for a phase before the one before it is complete,
# nor still wait when the one after it completes. The latter holds since lap k + 1 is loaded only after the reader of
# lap k has arrived, thus after it has passed its wait for it. The former holds for the producer, as it waits for every
# lap. A consumer skips the tiles of the other, so it begins tile n only when `passed` of the other tells that it has
# passed all waits of tile n - 1.


def read_in_tiles(matrix: torch.Tensor, high: int, wide: int) -> TensorDescriptor:
    """`stored_in_tiles` of a matrix that is only read, of any strides."""
    return stored_in_tiles(readable(matrix), high, wide)


def stored_in_tiles(matrix: torch.Tensor, high: int, wide: int) -> TensorDescriptor:
    """The matrix in tiles (high, wide). The descriptor is passed by value, so a CUDA graph keeps it."""
    return TensorDescriptor.from_tensor(matrix, [high, wide], layout_of(high, wide))


def layout_of(high: int, wide: int) -> gl.NVMMASharedLayout:
    """How a tile of a half precision lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([high, wide], gl.bfloat16)


def launch(kernel: Any, result: torch.Tensor, wide: int, *given: Any) -> None:
    """Runs a kernel on a program for each multiprocessor, each of which computes tile after tile of the result."""
    rows, columns = result.shape
    programs = min(triton.cdiv(rows, HIGH.value) * triton.cdiv(columns, wide), multiprocessors_of(result.device))
    with on_device_of(result):
        bind_context(result.device)
        kernel[(programs,)](*given, rows, columns, num_warps=WARPS_OF_CONSUMER)


@gluon.jit
def ring_of(left, right, RIGHTS: gl.constexpr):
    """(buffers of a tile of `left`, `RIGHTS` of one of `right`, their full barriers, their empty ones, `passed`)."""
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES, HIGH, DEEP], left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [RIGHTS, right.block_shape[0], right.block_shape[1]], right.layout)
    return lefts, rights, barriers_of(STAGES), barriers_of(STAGES), barriers_of(CONSUMERS)


@gluon.jit
def barriers_of(COUNT: gl.constexpr):
    """Barriers for one arrival each."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=1)
    fence_async_shared()  # the tensor memory accelerator arrives at them too
    return barriers


@gluon.jit
def tiles_of(rows, columns, WIDE: gl.constexpr):
    return gl.cdiv(rows, HIGH) * gl.cdiv(columns, WIDE)


@gluon.jit
def load_tiles(ring, left, right, beside, rows, columns, inner, WIDE: gl.constexpr, IS_TRANSPOSED: gl.constexpr):
    """The producer, where a tile needs nothing but its products."""
    steps, programs = gl.cdiv(inner, DEEP), gl.num_programs(0)
    for tile in range(gl.program_id(0), tiles_of(rows, columns, WIDE), programs):
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        load_steps(ring, left, right, beside, row, column, tile // programs, steps, IS_TRANSPOSED)


@gluon.jit
def load_steps(ring, left, right, beside, row, column, number, steps, IS_TRANSPOSED: gl.constexpr):
    """Loads what tile `number` needs; of a `right` (columns, inner) if it is transposed, else of (inner, columns).

    `beside`: a second matrix like `right`, whose tiles go into every other buffer of them; or None.
    """
    lefts, rights, full, empty, _ = ring
    stage, parity = number * steps % STAGES, number * steps // STAGES & 1
    for step in range(steps):
        at = step * DEEP
        mbarrier.wait(empty.index(stage), parity ^ 1)
        place = [column, at] if IS_TRANSPOSED else [at, column]
        if beside is None:
            mbarrier.expect(full.index(stage), left.block_type.nbytes + right.block_type.nbytes)
            tma.async_copy_global_to_shared(left, [row, at], full.index(stage), lefts.index(stage))
            tma.async_copy_global_to_shared(right, place, full.index(stage), rights.index(stage))
        else:
            mbarrier.expect(full.index(stage), left.block_type.nbytes + 2 * right.block_type.nbytes)
            tma.async_copy_global_to_shared(left, [row, at], full.index(stage), lefts.index(stage))
            tma.async_copy_global_to_shared(right, place, full.index(stage), rights.index(2 * stage))
            tma.async_copy_global_to_shared(beside, place, full.index(stage), rights.index(2 * stage + 1))
        stage, parity = following(stage, parity)


@gluon.jit
def with_products(total, ring, number, steps, CONSUMER: gl.constexpr, IS_TRANSPOSED: gl.constexpr):
    """Adds the products of tile `number`.

    A buffer is given back when the products of the next one have begun, so that the tensor cores never wait for it.
    Each warp waits only for its own products, hence the barrier of them all before one thread arrives for them.
    """
    lefts, rights, full, empty, passed = ring
    mbarrier.wait(passed.index(1 - CONSUMER), (number - 1) // CONSUMERS & 1, pred=number > 0)
    stage, parity = number * steps % STAGES, number * steps // STAGES & 1
    for step in range(steps):
        mbarrier.wait(full.index(stage), parity)
        right = rights.index(stage)
        if IS_TRANSPOSED:
            right = right.permute((1, 0))
        total = warpgroup_mma(lefts.index(stage), right, total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        barrier()
        mbarrier.arrive(empty.index(preceding(stage)), pred=step > 0)
        stage, parity = following(stage, parity)
    mbarrier.arrive(passed.index(CONSUMER))
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    barrier()
    mbarrier.arrive(empty.index(preceding(stage)))
    return total


@gluon.jit
def preceding(stage):
    """The stage before. Triton 3.6 does not carry a variable through a loop that begins as an equal of another."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def following(stage, parity):
    """The stage after, and the parity of its lap."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, parity ^ 1, parity)


@gluon.constexpr_function
def product_layout(wide):
    """How a consumer holds a tile whose `wide` columns it computes at once."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS_OF_CONSUMER, 1], instr_shape=[16, wide, 16])


@gluon.jit
def store_piece(value, target, buffer, row, column):
    """Stores through one of two buffers in turns, thus the last but one store has read what is overwritten here."""
    tma.store_wait(1)
    buffer.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(target, [row, column], buffer)
