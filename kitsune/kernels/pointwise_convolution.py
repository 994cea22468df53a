"""A convolution of single positions (1 x 1) that also gives the statistics for the batch norm after it.

It is one matrix product: rows are the positions of all images, columns the channels. Each program computes tiles of its
transpose, so that the positions of a channel lie in one warp: compiled for Hopper, a tile of 128 x 128 then takes 9
shuffles a thread in place of 217. A program combines its tiles, and a second kernel all programs, by the formula of
Chan, Golub, LeVeque 1979. Sums go in a fixed order, without atomics, so results are bitwise reproducible.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import IS_INTERPRETED, bind_context, on_device_of, runs_in_triton
from kitsune.kernels.layouts import Shape
from kitsune.kernels.products import (
    ALIGNED,
    HOPPER,
    OFFERED,
    Tiling,
    described,
    halves_of,
    multiprocessors_of,
    with_product,
)

#: Tiles of positions (high) and channels of the result (wide), the fastest of 16 on an H200. None spills on Hopper.
NARROW: Final = Tiling(high=128, wide=64, deep=64, pieces=1, stages=4, warps=4, programs=2)
#: Where products are long, and spread to more channels.
WIDE: Final = Tiling(high=128, wide=128, deep=64, pieces=2, stages=3, warps=8, programs=2, registers=128)
#: Channels whose sums one program combines, as many as a sector of memory holds.
COMBINED: Final = 8
#: The most elements of a thread while sums are combined.
EACH: Final = 32


def pointwise_convolution(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, variance): y (n, out, h, w) is `F.conv2d` of `x` (n, c, h, w) with `weight` (out, c, 1, 1).

    Mean and variance (out,) are those of each channel of y as it is rounded, over images and positions, in fp32; the
    variance is the biased one. y is channels_last, in the dtype of both. Sums are in fp32, and gradients flow through
    all three results. Falls back to `reference` where `is_offered` is False.
    """
    if not is_offered(x, weight):
        return reference(x, weight)
    y, mean, variance = forward(x, weight)
    return y, mean, variance


def reference(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`pointwise_convolution` in eager torch, with statistics in fp32 (fp64 for fp64)."""
    y = F.conv2d(x, weight)
    variance, mean = torch.var_mean(y.to(wide_of(y)), (0, 2, 3), correction=0)
    return y, mean, variance


def is_offered(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels compute it: in half precision, channels_last, with channels of a multiple of 16 bytes, on
    Hopper or newer."""
    return (
        runs_in_triton(x, weight)
        and x.ndim == weight.ndim == 4
        and x.dtype == weight.dtype
        and x.dtype in OFFERED
        and x.device == weight.device
        and tuple(weight.shape[2:]) == (1, 1)
        and x.shape[1] == weight.shape[1]
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and all(n > 0 and n * x.element_size() % ALIGNED == 0 for n in weight.shape[:2])
        and (IS_INTERPRETED or torch.cuda.get_device_properties(x.device).major >= HOPPER)
    )


@torch.library.custom_op("kitsune::pointwise_convolution", mutates_args=())
def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`pointwise_convolution`, for arguments that `is_offered` accepts."""
    y, mean, variance = results_of(x, weight)
    images, result = rows_of(x), rows_of(y)
    (rows, columns), inner = result.shape, images.shape[1]
    tiling = tiling_of(inner, columns)
    high, wide, deep, pieces, *_ = tiling
    tiles, across = triton.cdiv(rows, high), triton.cdiv(columns, wide)
    shares = shares_of(tiles, across, tiling.programs * multiprocessors(x))
    partial = x.new_empty(2, shares, columns, dtype=torch.float32)
    options = {"num_stages": tiling.stages, "num_warps": tiling.warps, "maxnreg": tiling.registers}
    held = triton.next_power_of_2(shares)
    with on_device_of(x):
        bind_context(x.device)
        forward_kernel[(across * shares,)](
            described(images, high, deep),
            described(weight.flatten(1), wide, deep),
            described(result, high // pieces, wide),
            *partial,
            *(rows, columns, inner, shares),
            *(high, wide, deep, pieces, inner <= deep),
            **options,
        )
        combine_kernel[(triton.cdiv(columns, COMBINED),)](
            *partial, mean, variance, rows, shares, columns, high, held, COMBINED, num_warps=warps_of(held)
        )
    return y, mean, variance


@forward.register_fake
def results_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers for the results."""
    shape = x.shape[0], weight.shape[0], *x.shape[2:]
    y = torch.empty(*shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    mean, variance = (x.new_empty(weight.shape[0], dtype=torch.float32) for _ in range(2))
    return y, mean, variance


@register_flop_formula(torch.ops.kitsune.pointwise_convolution)
def _(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * math.prod(x[2:]) * math.prod(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[:2])


def _gradients(
    ctx: Any, dy: torch.Tensor | None, dmean: torch.Tensor | None, dvariance: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    x, weight, y, mean = ctx.saved_tensors
    slopes = slopes_of(y, mean, dy, dmean, dvariance)
    if slopes is None or not any(ctx.needs_input_grad):
        return None, None
    needed = (*ctx.needs_input_grad, False)
    window = (1, 1), (0, 0), (1, 1), False, (0, 0), 1
    dx, dweight, _ = torch.ops.aten.convolution_backward(slopes, x, weight, None, *window, needed)
    return dx, dweight


forward.register_autograd(_gradients, setup_context=_keep)


def slopes_of(
    y: torch.Tensor,
    mean: torch.Tensor,
    dy: torch.Tensor | None,
    dmean: torch.Tensor | None,
    dvariance: torch.Tensor | None,
) -> torch.Tensor | None:
    """The gradient of y, also through its statistics: summed in fp32, and rounded once to the dtype of y."""
    count = y.numel() // y.shape[1]
    parts: list[torch.Tensor] = [] if dy is None else [dy.float()]
    if dmean is not None:
        parts.append(spread(dmean / count).expand(y.shape))
    if dvariance is not None:
        parts.append(spread(dvariance * 2 / count) * (y.float() - spread(mean)))
    if not parts:
        return None
    return sum(parts[1:], parts[0]).to(y.dtype).contiguous(memory_format=torch.channels_last)


def spread(vector: torch.Tensor) -> torch.Tensor:
    """A number for each channel, to be broadcast over images (n, c, h, w)."""
    return vector[:, None, None]


class Normalised(torch.autograd.Function):
    """(y - mean) * rsqrt(variance + eps) * weight + bias, in fp32, rounded to the dtype of y (n, c, h, w).

    Vectors are (c,) in fp32. By torch's own rules the backward would take four sums over all positions; it takes two,
    since the gradients of mean and variance follow from those of bias and weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(y, mean, variance, weight)
        ctx.eps = eps
        normal = (y.float() - spread(mean)) * spread(torch.rsqrt(variance + eps))
        return (normal * spread(weight) + spread(bias)).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, mean, variance, weight = ctx.saved_tensors
        slopes, scale = slopes.float(), torch.rsqrt(variance + ctx.eps)
        factor = scale * weight
        dbias = slopes.sum((0, 2, 3))
        dweight = (slopes * ((y.float() - spread(mean)) * spread(scale))).sum((0, 2, 3))
        dy = (slopes * spread(factor)).to(y.dtype)
        return dy, -factor * dbias, -0.5 * factor * scale * dweight, dweight, dbias, None


def rows_of(images: torch.Tensor) -> torch.Tensor:
    """Images (n, c, h, w) as a matrix (positions, channels), a view where they are channels_last."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


def tiling_of(inner: int, columns: int) -> Tiling:
    """By the channels of the images and of the result."""
    return WIDE if NARROW.deep < inner < columns else NARROW


def shares_of(tiles: int, across: int, resident: int) -> int:
    """Into how many programs the rows of tiles of one column are shared, if so many programs are resident in all."""
    return max(1, min(tiles, resident // across))


def multiprocessors(x: torch.Tensor) -> int:
    return multiprocessors_of(x.device) if x.is_cuda else 1


def warps_of(held: int) -> int:
    return max(1, min(16, held * COMBINED // (32 * EACH)))


@triton.jit(do_not_specialize=["rows", "shares"])
def forward_kernel(
    x, weight, y, means, squares, rows, columns, inner, shares,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, PIECES: tl.constexpr, IS_ONCE: tl.constexpr,
):  # fmt: skip
    """Each program computes tiles of the same channels, one after another, and the mean of each channel over all of
    them with the squares about it.

    IS_ONCE: one product of `DEEP` channels is all of a tile, so the weight is loaded once.
    """
    tl.assume(inner > 0)  # else the code for no products at all is there as well
    across = tl.cdiv(columns, WIDE)
    column = tl.program_id(0) % across * WIDE
    share = tl.program_id(0) // across
    mean = tl.zeros((WIDE,), dtype=tl.float32)
    square = tl.zeros((WIDE,), dtype=tl.float32)
    if IS_ONCE:
        kept = weight.load([column, 0])
        for tile in tl.range(share, tl.cdiv(rows, HIGH), shares):
            total = with_product(tl.zeros((WIDE, HIGH), dtype=tl.float32), kept, x.load([tile * HIGH, 0]).T)
            before = (tile - share) // shares * HIGH
            mean, square = stored(total, y, mean, square, before, tile * HIGH, column, rows, HIGH, PIECES)
    else:
        # A second counter for what follows the product: the loads of the next tile begin before this one is stored.
        finished = share - shares
        for tile in tl.range(share, tl.cdiv(rows, HIGH), shares, flatten=True):
            total = tl.zeros((WIDE, HIGH), dtype=tl.float32)
            for at in range(tl.cdiv(inner, DEEP)):
                one, other = weight.load([column, at * DEEP]), x.load([tile * HIGH, at * DEEP])
                total = with_product(total, one, other.T)
            finished += shares
            before = (finished - share) // shares * HIGH
            mean, square = stored(total, y, mean, square, before, finished * HIGH, column, rows, HIGH, PIECES)
    channel = column + tl.arange(0, WIDE)
    to = share * columns + channel
    tl.store(means + to, mean, mask=channel < columns)
    tl.store(squares + to, square, mask=channel < columns)


@triton.jit
def stored(
    total, y, mean, square, before, row, column, rows,
    HIGH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Stores a tile of y, which is given transposed. (mean, squares about it) of each channel, which were those of so
    many positions `before`, with those of the tile.

    Positions beyond the end are zeros, so they add nothing to the mean; they are left out of the squares.
    """
    rounded = total.to(y.dtype)
    store_turned(rounded, y, row, column, HIGH, PIECES)
    value, count = rounded.to(tl.float32), tl.minimum(rows - row, HIGH)
    middle = tl.sum(value, 1) / count
    away = tl.where((tl.arange(0, HIGH) < count)[None, :], value - middle[:, None], 0.0)
    apart, part = middle - mean, count / (before + count)
    return mean + apart * part, square + tl.sum(away * away, 1) + apart * apart * before * part


@triton.jit
def store_turned(turned, y, row, column, HIGH: tl.constexpr, PIECES: tl.constexpr):
    """Stores the transpose of a tile, in so many pieces one below the other."""
    if PIECES > 1:
        upper, lower = halves_of(turned)
        store_turned(upper, y, row, column, HIGH // 2, PIECES // 2)
        store_turned(lower, y, row + HIGH // 2, column, HIGH // 2, PIECES // 2)
    else:
        y.store([row, column], turned.T)


@triton.jit(do_not_specialize=["rows", "shares"])
def combine_kernel(
    means, squares, mean, variance, rows, shares, columns,
    HIGH: tl.constexpr, HELD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Combines all shares of some channels. Means are relative to that of the first share, squares to the mean of all,
    so a large mean adds no further error."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid = channel < columns
    share = tl.arange(0, HELD)[:, None]
    inside = (share < shares) & valid[None, :]
    at = share * columns + channel[None, :]
    tiles = tl.cdiv(rows, HIGH)
    beyond = tl.where(share == (tiles - 1) % shares, tiles * HIGH - rows, 0)
    count = (tl.cdiv(tiles - share, shares) * HIGH - beyond).to(tl.float32)
    about = tl.load(means + channel, mask=valid, other=0.0)
    each = tl.load(means + at, mask=inside, other=0.0)
    middle = about + tl.sum(tl.where(inside, each - about, 0.0) * count, 0) / rows
    away = tl.where(inside, each - middle, 0.0)
    total = tl.load(squares + at, mask=inside, other=0.0) + away * away * count
    tl.store(mean + channel, middle, mask=valid)
    tl.store(variance + channel, tl.sum(total, 0) / rows, mask=valid)
