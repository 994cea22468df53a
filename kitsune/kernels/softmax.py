"""Softmax over the last dimension of scaled, masked scores, with each row read once and written once.

The mask is not copied: a broadcast dimension has stride 0. With `causal`, almost nothing beyond the diagonal is read.
The backward needs the output only, in which masked elements are 0.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import MOST_IN_A_BLOCK, on_device_of, runs_in_triton
from kitsune.kernels.rows import buffer_of, tile_of

#: The most leading dimensions of the kernel, after merging neighbours that one stride covers.
MOST_DIMENSIONS: Final = 4


def softmax(
    x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> torch.Tensor:
    """The softmax of `x` * `scale` along the last dimension of `x` (..., n), in the dtype of `x`.

    `mask` must broadcast to the shape of `x`: boolean, where True keeps an element, or fp32, bf16 or fp16, which is
    added. `causal` keeps elements on and below the diagonal of the last two dimensions, aligned to the top left corner
    as in scaled_dot_product_attention. A row without a kept element is 0, and so are its gradients.

    `x` may be fp32, bf16 or fp16; sums are in fp32. Falls back to `reference` for rows of more than 65536 elements, an
    added mask that requires a gradient, a mask whose rows need more than four strides, and where Triton cannot run.
    Raises RuntimeError if the mask does not broadcast.
    """
    if not is_offered(x, mask, causal):
        return reference(x, mask, scale, causal)
    return forward(x, mask, scale, causal)


def reference(
    x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = x.to(wide_of(x)) * scale
    if mask is not None:
        mask = mask.expand(x.shape)
        wide = wide.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else wide + mask.to(wide.dtype)
    if causal:
        kept = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        wide = wide.masked_fill(~kept, -torch.inf)
    is_dead = (wide == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(wide.masked_fill(is_dead, 0.0), -1).masked_fill(is_dead, 0.0).to(x.dtype)


def is_offered(x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> bool:
    """Whether the kernels support it."""
    if x.shape[-1] > MOST_IN_A_BLOCK or not runs_in_triton(x):
        return False
    if mask is None:
        return True
    is_one_we_read = mask.dtype == torch.bool or (runs_in_triton(mask) and not mask.requires_grad)
    return is_one_we_read and len(dimensions_of(x, mask, causal)) <= MOST_DIMENSIONS


def dimensions_of(x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> list[tuple[int, int]]:
    """(size, stride in the mask) of the dimensions before the last, merged as far as possible.

    Neighbours are merged where one stride covers both. With `causal`, the dimension of rows stays separate.
    """
    sizes = x.shape[:-1]
    strides = [0] * len(sizes) if mask is None else mask.expand(x.shape).stride()[:-1]
    if causal:
        return [*merged(sizes[:-1], strides[:-1]), (sizes[-1], strides[-1])]
    return merged(sizes, strides)


def merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions, without those of size 1, and with neighbours that one stride covers merged."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        elif size != 1:
            found.append((size, stride))
    return found


@torch.library.custom_op("kitsune::softmax", mutates_args=())
def forward(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    """The softmax, for arguments that `is_offered` accepts."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if not x.numel():
        return y
    dimensions = dimensions_of(x, mask, causal)
    dimensions = [(1, 0)] * (MOST_DIMENSIONS - len(dimensions)) + dimensions
    (_, first), (seconds, second), (thirds, third), (height, down) = dimensions
    across = 0 if mask is None else mask.expand(x.shape).stride(-1)
    columns = x.shape[-1]
    high, block, warps = tile_of(height, columns)
    tiles = triton.cdiv(height, high)
    grid = (x.numel() // (height * columns) * tiles,)
    given = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
    with on_device_of(x):
        forward_kernel[grid](
            x,
            given,
            y,
            scale,
            height,
            columns,
            tiles,
            seconds,
            thirds,
            first,
            second,
            third,
            down,
            across,
            causal,
            high,
            block,
            num_warps=warps,
        )
    return y


@forward.register_fake
def _(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    return buffer_of(x, x)


@torch.library.custom_op("kitsune::softmax_backward", mutates_args=())
def backward(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """The gradient of x, in its dtype."""
    dy = dy.contiguous()
    dx = torch.empty_like(y)
    if not y.numel():
        return dx
    height, columns = y.shape[-2] if causal else y.numel() // y.shape[-1], y.shape[-1]
    high, block, warps = tile_of(height, columns)
    tiles = triton.cdiv(height, high)
    grid = (y.numel() // (height * columns) * tiles,)
    with on_device_of(y):
        backward_kernel[grid](dy, y, dx, scale, height, columns, tiles, causal, high, block, num_warps=warps)
    return dx


@backward.register_fake
def _(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    return buffer_of(y, y)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return backward(dy, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def forward_kernel(
    x,
    mask,
    y,
    scale,
    height,
    columns,
    tiles,
    seconds,
    thirds,
    first,
    second,
    third,
    down,
    across,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane = tl.program_id(0) // tiles
    row, at, offset, inside, read = tile_in(plane, height, columns, tiles, CAUSAL, ROWS, BLOCK)
    value = tl.load(x + offset + at, mask=read, other=0.0).to(tl.float32) * scale
    kept = read
    if CAUSAL:
        kept = read & (at <= row)
    if mask is not None:
        mask += (plane // (seconds * thirds)).to(tl.int64) * first
        mask += (plane // thirds % seconds).to(tl.int64) * second + (plane % thirds).to(tl.int64) * third
        given = tl.load(mask + row * down + at.to(tl.int64) * across, mask=read, other=0)
        if mask.dtype.element_ty == tl.uint8:
            kept = kept & (given != 0)
        else:
            value += given.to(tl.float32)
    value = tl.where(kept, value, float("-inf"))
    most = tl.max(value, 1, keep_dims=True)
    power = tl.exp(value - tl.where(most == float("-inf"), 0.0, most))  # all 0 in a row without a kept element
    total = tl.sum(power, 1, keep_dims=True)
    result = power * (1.0 / tl.where(total == 0.0, 1.0, total))
    tl.store(y + offset + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, y, dx, scale, height, columns, tiles, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    plane = tl.program_id(0) // tiles
    _, at, offset, inside, read = tile_in(plane, height, columns, tiles, CAUSAL, ROWS, BLOCK)
    value = tl.load(y + offset + at, mask=read, other=0.0).to(tl.float32)
    slope = tl.load(dy + offset + at, mask=read, other=0.0).to(tl.float32)
    mean = tl.sum(value * slope, 1, keep_dims=True)
    tl.store(dx + offset + at, (value * (slope - mean) * scale).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def tile_in(plane, height, columns, tiles, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows in the plane, columns, offsets of the rows, mask of existing elements, mask of elements to read).

    With `causal`, elements are read up to the group of 16 that contains the diagonal, so that loads stay wide.
    """
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < height) & (at < columns)
    read = inside
    if CAUSAL:
        read = inside & (at // 16 * 16 <= row)
    return row, at, (plane.to(tl.int64) * height + row) * columns, inside, read
