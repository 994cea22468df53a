"""dropout(x + bias) + residual in one pass (Srivastava et al. 2014, with the kept values scaled up).

No mask is stored: it is generated from a seed with Philox (Salmon et al. 2011), and again in the backward pass. The
gradient of the bias is summed in two steps in a fixed order, without atomics, so it is bitwise reproducible.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import count, on_device_of, runs_in_triton, warps_of
from kitsune.kernels.tiles import shares_of, tile_of

#: Programs of a backward pass that sums over rows: four for each multiprocessor of an H200, all resident at once with
#: the 96 registers a thread that Philox needs in a loop.
PROGRAMS: Final = 528

#: The number of possible seeds. Inductor writes the bounds of randint as int32, and 2**62 becomes 0 there.
SEEDS: Final = 2**31 - 1


def dropout_add(
    x: torch.Tensor, residual: torch.Tensor, p: float, bias: torch.Tensor | None = None, training: bool = True
) -> torch.Tensor:
    """dropout(`x` + `bias`) + `residual` for `x` and `residual` (..., n), `bias` (n,) or None, in the dtype of `x`.

    Each element is dropped with probability `p`, and the others are divided by 1 - p. For p = 0 or without `training`
    nothing is dropped and no random numbers are drawn; for p = 1 the result is the residual. Raises ValueError for a p
    outside [0, 1]. Falls back to `reference`, which draws other random numbers, where Triton cannot run and for shapes
    to be broadcast.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p is the share of elements to drop, from 0 to 1; it is {p}")
    fits = x.shape == residual.shape and (bias is None or bias.shape == x.shape[-1:])
    if not fits or not runs_in_triton(x, residual, bias):
        return reference(x, residual, p, bias, training)
    seed = torch.randint(SEEDS, (1,), device=x.device) if p and training else None
    return forward(x, residual, bias, seed, p)


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    bias: torch.Tensor | None = None,
    training: bool = True,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """`dropout_add` in eager torch, computed in fp32 (fp64 for fp64).

    `kept` is True for each element to keep; drawn when not given.
    """
    wide = x.to(wide_of(x))
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    if p and training:
        kept = torch.rand(x.shape, device=x.device) >= p if kept is None else kept
        wide = torch.where(kept, wide * scale_of(p), 0)
    return (wide + residual.to(wide.dtype)).to(x.dtype)


@torch.library.custom_op("kitsune::dropout_add", mutates_args=())
def forward(
    x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, seed: torch.Tensor | None, p: float
) -> torch.Tensor:
    """The sum, contiguous. `seed` is an int64 tensor of one element; without it nothing is dropped."""
    x, residual = x.contiguous(), residual.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        rows, columns = count(x)
        high, wide = quarter_of(rows, columns)
        programs = triton.cdiv(rows, 4 * high) * triton.cdiv(columns, wide)
        given = None if bias is None else bias.contiguous()
        with on_device_of(x):
            forward_kernel[(programs,)](
                x, residual, given, seed, y, rows, columns, p, scale_of(p), high, wide, num_warps=warps_of(high * wide)
            )
    return y


@forward.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, seed: torch.Tensor | None, p: float
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("kitsune::dropout_add_backward", mutates_args=())
def backward(
    dy: torch.Tensor, bias: torch.Tensor | None, seed: torch.Tensor | None, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x, gradient of bias: empty without one), each in the dtype of its input."""
    dy, like = dy.contiguous(), dy.new_empty(0) if bias is None else bias
    dx = torch.empty_like(dy)
    if not dy.numel():
        return dx, torch.zeros_like(like, memory_format=torch.contiguous_format)
    rows, columns = count(dy)
    high, wide = quarter_of(rows, columns)
    tiles, across = triton.cdiv(rows, 4 * high), triton.cdiv(columns, wide)
    shares, share = (tiles, 1) if bias is None else shares_of(tiles, across, PROGRAMS)
    partial = None if bias is None else torch.empty(shares, columns, dtype=torch.float32, device=dy.device)
    with on_device_of(dy):
        backward_kernel[(shares * across,)](
            dy, seed, dx, partial, rows, columns, share, p, scale_of(p), high, wide, num_warps=warps_of(high * wide)
        )
    return dx, torch.empty_like(like) if partial is None else partial.sum(0).to(like.dtype)


@backward.register_fake
def _(
    dy: torch.Tensor, bias: torch.Tensor | None, seed: torch.Tensor | None, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    like = dy.new_empty(0) if bias is None else bias
    return (
        torch.empty_like(dy, memory_format=torch.contiguous_format),
        torch.empty_like(like, memory_format=torch.contiguous_format),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, bias, seed, ctx.p = inputs
    ctx.save_for_backward(bias, seed)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    bias, seed = ctx.saved_tensors
    if bias is None and seed is None:
        return dy, dy, None, None, None
    dx, dbias = backward(dy, bias, seed, ctx.p)
    return dx, dy, None if bias is None else dbias, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def scale_of(p: float) -> float:
    """The factor of kept values."""
    return 1 / (1 - p) if p < 1 else 0.0


def quarter_of(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a quarter of a tile: Philox gives four numbers at a time, one for each of its quarters.

    Forward and backward number the tiles in the same way, so that both generate the same mask.
    """
    return tile_of(triton.cdiv(rows, 4), columns)


@triton.jit
def forward_kernel(x, residual, bias, seed, y, rows, columns, p, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    first = (tile // across).to(tl.int64) * (4 * ROWS)
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if bias is not None:
        offset = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    if seed is not None:
        chances = four_chances(seed, tile.to(tl.int64), ROWS, COLUMNS)
    for quarter in tl.static_range(4):
        row = first + quarter * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += offset
        if seed is not None:
            value = tl.where(chances[quarter] >= p, value * scale, 0.0)
        value += tl.load(residual + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy, seed, dx, partial, rows, columns, share, p, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    part = (program // across).to(tl.int64)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for down in range(part * share, tl.minimum(part * share + share, tl.cdiv(rows, 4 * ROWS))):
        if seed is not None:
            chances = four_chances(seed, down * across + program % across, ROWS, COLUMNS)
        for quarter in tl.static_range(4):
            row = (down * 4 + quarter) * ROWS + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (column < columns)
            value = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            if seed is not None:
                value = tl.where(chances[quarter] >= p, value * scale, 0.0)
            total += value
            tl.store(dx + row * columns + column, value.to(dx.dtype.element_ty), mask=inside)
    if partial is not None:
        tl.store(partial + part * columns + column, tl.sum(total, axis=0, keep_dims=True), mask=column < columns)


@triton.jit
def four_chances(seed, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four random numbers in [0, 1) for each element of a quarter of the tile."""
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.rand4x(tl.load(seed), tile * (ROWS * COLUMNS) + place)
