"""The first convolution of a network, of images with up to four channels that are contiguous (channels_last).

For 3 channels cuDNN has kernels for Ampere only: in a ResNet-50 with 64 images on an H200 they take 387 us forward and
227 for the gradient of the weight, where memory would allow 30. Here a row of a window, as long as the kernel's width
times the channels, is one contiguous piece of an image. Products of such pieces and a row of the weight are added up
over the rows. Sums go in a fixed order, without atomics, so gradients are bitwise reproducible.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels.launch import IS_INTERPRETED, on_device_of, runs_in_triton
from kitsune.kernels.layouts import Shape
from kitsune.kernels.max_pool import windows_of

#: Triton's interpreter multiplies the bits of bf16 as integers.
OFFERED: Final = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.bfloat16, torch.float16)
#: The most channels of an image: more are worth cuDNN's kernels.
MOST_CHANNELS: Final = 4
#: The largest kernel, in each dimension.
MOST: Final = 11
#: The most elements of the images and of the result: offsets are int32, also those a tile beyond the end.
LARGEST: Final = 2**30
#: The fewest rows, columns and products of a tile of tensor cores.
LEAST: Final = 16
#: Positions of a tile, and its most channels.
HIGH: Final = 128
WIDE: Final = 64
#: Positions that a program multiplies at once in the backward.
DEEP: Final = 64
#: Programs of the backward: two for each multiprocessor of an H200.
PROGRAMS: Final = 264
WARPS: Final = 8
BACKWARD_WARPS: Final = 16


def stem_convolution(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """The convolution of `x` (n, c, h, w) with `weight` (out, c, height, width), as `F.conv2d` in one group.

    `stride` and `padding` are (height, width). The result (n, out, rows, columns) is channels_last, in the dtype of
    both. Sums are in fp32. Falls back to `F.conv2d` where `is_offered` is False; the gradient of x is torch's own.
    """
    if not is_offered(x, weight, stride, padding):
        return F.conv2d(x, weight, None, tuple(stride), tuple(padding))
    return forward(x, weight, stride, padding)


def is_offered(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the kernels support it: in half precision, `x` channels_last with up to four channels."""
    if x.ndim != 4 or weight.ndim != 4 or not runs_in_triton(x, weight):
        return False
    rows, columns = windows_of(x.shape, weight.shape[2:], stride, padding)
    return (
        x.dtype == weight.dtype
        and x.dtype in OFFERED
        and x.device == weight.device
        and x.shape[1] == weight.shape[1] <= MOST_CHANNELS
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.numel() > 0
        and weight.numel() > 0
        and max(weight.shape[2:]) <= MOST
        and min(*stride, rows, columns) > 0
        and min(padding) >= 0
        and max(x.numel(), len(x) * rows * columns * weight.shape[0]) <= LARGEST
    )


@torch.library.custom_op("kitsune::stem_convolution", mutates_args=())
def forward(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> torch.Tensor:
    """`stem_convolution`, for arguments that `is_offered` accepts."""
    y = results_of(x, weight, stride, padding)
    channels, (height, width) = x.shape[1], weight.shape[2:]
    out, rows, columns = y.shape[1:]
    wide = fitting(out, WIDE)
    tiles = triton.cdiv(len(x) * rows * columns, HIGH), triton.cdiv(out, wide)
    with on_device_of(x):
        forward_kernel[tiles](
            x,
            by_rows(weight),
            y,
            len(x) * rows * columns,
            *x.shape[2:],
            rows,
            columns,
            out,
            *(channels, height, width, *stride, *padding),
            HIGH,
            wide,
            fitting(width * channels),
            num_warps=WARPS,
        )
    return y


@forward.register_fake
def results_of(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> torch.Tensor:
    """A buffer for the result."""
    shape = (x.shape[0], weight.shape[0], *windows_of(x.shape, weight.shape[2:], stride, padding))
    return torch.empty(*shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("kitsune::stem_convolution_backward", mutates_args=())
def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """The gradient of `weight`, in its dtype and layout."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    out, channels, height, width = weight.shape
    rows, columns = dy.shape[2:]
    piece, wide, positions = fitting(width * channels), fitting(out, WIDE), len(x) * rows * columns
    share = triton.cdiv(triton.cdiv(positions, DEEP), PROGRAMS)
    programs = triton.cdiv(triton.cdiv(positions, DEEP), share)
    sums = torch.empty(programs, height, width * channels, out, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        backward_kernel[programs, triton.cdiv(out, wide)](
            dy,
            x,
            sums,
            positions,
            share,
            *x.shape[2:],
            rows,
            columns,
            out,
            *(channels, height, width, *stride, *padding),
            DEEP,
            wide,
            piece,
            triton.next_power_of_2(height),
            num_warps=BACKWARD_WARPS,
        )
    whole = sums.sum(0).view(height, width, channels, out).permute(3, 2, 0, 1)
    return torch.empty_like(weight).copy_(whole)


@backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    return torch.empty_like(weight)


@register_flop_formula([torch.ops.kitsune.stem_convolution, torch.ops.kitsune.stem_convolution_backward])
def _(first: Shape, second: Shape, *given: Any, out_shape: Any, **_: Any) -> int:
    """Of (x, weight, stride, padding) or (dy, x, weight, ...)."""
    is_forward = len(given[0]) == 2
    weight, y = (second, out_shape) if is_forward else (given[0], first)
    return 2 * math.prod(y) * math.prod(weight[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], **_: Any) -> None:
    x, weight, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    dx = None
    if needs_x:
        window = (ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1)
        dx, *_ = torch.ops.aten.convolution_backward(dy, x, weight, None, *window, (True, False, False))
    return dx, backward(dy, x, weight, ctx.stride, ctx.padding) if needs_weight else None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def by_rows(weight: torch.Tensor) -> torch.Tensor:
    """The weight as (height, width, channels, out), so that a row of it is a matrix (width * channels, out)."""
    return weight.permute(2, 3, 1, 0).contiguous()


def fitting(size: int, most: int | None = None) -> int:
    """The least size of a tile that holds so many, a power of two; but at most `most`."""
    fits = max(LEAST, triton.next_power_of_2(size))
    return fits if most is None else min(fits, most)


@triton.jit
def corners_of(position, rows, columns, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    """(image, first row, first column) of the window of each position of the result; rows may lie in the padding."""
    column, left = position % columns, position // columns
    return left // rows, left % rows * SH - PH, column * SW - PW


@triton.jit
def forward_kernel(
    x, weight, y, positions, height, width, rows, columns, out,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    image, top, left = corners_of(position, rows, columns, SH, SW, PH, PW)
    within = tl.arange(0, PIECE)
    column = left[:, None] + (within // CHANNELS)[None, :]
    is_there = (position < positions)[:, None] & (column >= 0) & (column < width) & (within < KW * CHANNELS)[None, :]
    is_weight = (within < KW * CHANNELS)[:, None] & (channel < out)[None, :]
    total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    for i in range(KH):
        row = (top + i)[:, None]
        at = ((image[:, None] * height + row) * width + left[:, None]) * CHANNELS + within[None, :]
        piece = tl.load(x + at, mask=is_there & (row >= 0) & (row < height), other=0.0)
        of_row = weight + (i * KW * CHANNELS + within)[:, None] * out + channel[None, :]
        total = tl.dot(piece, tl.load(of_row, mask=is_weight, other=0.0), total)
    to = y + position[:, None] * out + channel[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(position < positions)[:, None] & (channel < out)[None, :])


@triton.jit
def backward_kernel(
    dy, x, sums, positions, share, height, width, rows, columns, out,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program adds up the products of `share` tiles of positions, for all rows of the weight at once."""
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    within = tl.arange(0, ROWS * PIECE)
    i, of_row = within // PIECE, within % PIECE
    is_weight = (i < KH) & (of_row < KW * CHANNELS)
    total = tl.zeros((ROWS * PIECE, WIDE), dtype=tl.float32)
    begin = tl.program_id(0) * share
    for tile in range(begin, begin + share):
        position = tile * DEEP + tl.arange(0, DEEP)
        image, top, left = corners_of(position, rows, columns, SH, SW, PH, PW)
        row, column = top[None, :] + i[:, None], left[None, :] + (of_row // CHANNELS)[:, None]
        is_there = (position < positions)[None, :] & (column >= 0) & (column < width) & (row >= 0) & (row < height)
        at = ((image[None, :] * height + row) * width + left[None, :]) * CHANNELS + of_row[:, None]
        pieces = tl.load(x + at, mask=is_there & is_weight[:, None], other=0.0)
        slope = dy + position[:, None] * out + channel[None, :]
        is_slope = (position < positions)[:, None] & (channel < out)[None, :]
        total = tl.dot(pieces, tl.load(slope, mask=is_slope, other=0.0), total)
    to = (tl.program_id(0) * KH + i) * (KW * CHANNELS) + of_row
    tl.store(sums + to[:, None] * out + channel[None, :], total, mask=is_weight[:, None] & (channel < out)[None, :])
