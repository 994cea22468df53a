"""The first convolution of a network, of images with up to four channels (channels_last).

For 3 channels cuDNN has kernels for Ampere only: in a ResNet-50 with 64 images on an H200 they take 390 us forward, 230
for the gradient of the weight and 82 to add a channel, where memory would allow 30 each. Here a block of as many
positions as the stride becomes one position with all their channels, as in NVIDIA's and Google's records of MLPerf: a
kernel of 7 x 7 and stride 2 over 3 channels is then one of 4 x 4 and stride 1 over 16. A row of its window is one
contiguous piece of the image that begins at a multiple of 16 bytes. Products of such pieces and a row of the weight are
added up over the rows. Sums go in a fixed order, without atomics, so gradients are bitwise reproducible.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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
#: The largest kernel and stride, in each dimension.
MOST: Final = 11
MOST_STRIDE: Final = 4
#: The most elements of the images in blocks and of the result: offsets are int32, also those a tile beyond the end.
LARGEST: Final = 2**30
#: A thread loads so many elements at once, so channels are filled up to a multiple of them.
LOADED: Final = 8
#: The fewest rows, columns and products of a tile of tensor cores.
LEAST: Final = 16
#: Positions of a tile, and its most channels.
HIGH: Final = 128
WIDE: Final = 64
#: Positions that a program multiplies at once in the backward.
DEEP: Final = 64
#: Programs of the backward: one for each multiprocessor of an H200, or four where the tile of a weight has few rows.
PROGRAMS: Final = 132
FEW: Final = 128
WARPS: Final = 8
#: Stages of the backward, the fastest of nine settings on an H200, in six layers of models.
STAGES: Final = 3
#: The most rows of a weight's tile: a thread then holds 128 sums.
MOST_ROWS: Final = 512


class Blocks(NamedTuple):
    """One dimension of a convolution in blocks of `stride` positions.

    `before`, `after`: the zeros around an image, a negative number for positions that no window reaches. `lead`,
    `trail`: the zeros around a kernel, which make it `of_kernel` whole blocks.
    """

    stride: int
    before: int
    after: int
    lead: int
    trail: int
    of_kernel: int

    @classmethod
    def of(cls, size: int, kernel: int, stride: int, padding: int) -> "Blocks":
        lead = -padding % stride
        count = math.ceil((kernel + lead) / stride)
        windows = (size + 2 * padding - kernel) // stride + 1
        before = padding + lead
        after = (windows - 1 + count) * stride - before - size
        return cls(stride, before, after, lead, count * stride - lead - kernel, count)


def blocks_of(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Blocks, Blocks, int]:
    """Blocks of the height and of the width, and the channels of an image with those of zeros."""
    given = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    high, wide = (Blocks.of(*each) for each in given)
    multiple = LOADED // math.gcd(LOADED, math.prod(stride))
    return high, wide, math.ceil(x.shape[1] / multiple) * multiple


def stem_convolution(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """The convolution of `x` (n, c, h, w) with `weight` (out, c, height, width), as `F.conv2d` in one group.

    `stride` and `padding` are (height, width). The result (n, out, rows, columns) is channels_last, in the dtype of
    both. Sums are in fp32. What is not finite in an image may also show in results whose window ends less than a stride
    from it. Falls back to `F.conv2d` where `is_offered` is False; the gradient of x is torch's own.
    """
    if not is_offered(x, weight, stride, padding):
        return F.conv2d(x, weight, None, tuple(stride), tuple(padding))
    images, kernels = in_blocks(x, weight, stride, padding)
    return forward(images, kernels)


def is_offered(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the kernels support it: in half precision, `x` channels_last with up to four channels."""
    if x.ndim != 4 or weight.ndim != 4 or not runs_in_triton(x, weight):
        return False
    if not 0 < min(stride) <= max(stride) <= MOST_STRIDE:
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
        and min(rows, columns) > 0
        and min(padding) >= 0
        and is_small(*blocks_of(x, weight, stride, padding))
        and len(x) * (rows + MOST) * (columns + MOST) * max(weight.shape[0], LOADED * math.prod(stride)) <= LARGEST
    )


def is_small(high: Blocks, wide: Blocks, channels: int) -> bool:
    """Whether one tile of the backward holds the rows of a weight in blocks."""
    piece = fitting(wide.of_kernel * high.stride * wide.stride * channels)
    return triton.next_power_of_2(high.of_kernel) * piece <= MOST_ROWS


def in_blocks(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, weight) channels_last, whose convolution with stride 1 and without padding is the one given.

    Compiled, each is one pass, which rounds as well.
    """
    high, wide, channels = blocks_of(x, weight, stride, padding)
    more = channels - x.shape[1]
    around = (wide.before, wide.after, high.before, high.after, 0, more)
    whole = (wide.lead, wide.trail, high.lead, high.trail, 0, more)
    return grouped(F.pad(x, around), high.stride, wide.stride), grouped(F.pad(weight, whole), high.stride, wide.stride)


def grouped(x: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """(n, c, h, w) as (n, high * wide * c, h / high, w / wide), channels_last."""
    blocks = x.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 3, 5, 1)
    return blocks.flatten(3).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("kitsune::stem_convolution", mutates_args=())
def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution of `x` (n, c, h, w), channels_last, with `weight` (out, c, height, width), with stride 1 and
    without padding. c is a multiple of 8."""
    y = results_of(x, weight)
    out, rows, columns = y.shape[1:]
    channels, (height, width) = x.shape[1], weight.shape[2:]
    positions, wide = len(x) * rows * columns, fitting(out, WIDE)
    with on_device_of(x):
        forward_kernel[triton.cdiv(positions, HIGH), triton.cdiv(out, wide)](
            x,
            weight.permute(2, 3, 1, 0).contiguous(),
            y,
            *(positions, rows, columns, out),
            *(channels, height, width),
            *(HIGH, wide, fitting(width * channels)),
            num_warps=WARPS,
        )
    return y


@forward.register_fake
def results_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A buffer for the result."""
    shape = x.shape[0], weight.shape[0], *(n - k + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True))
    return torch.empty(*shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@torch.library.custom_op("kitsune::stem_convolution_backward", mutates_args=())
def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of `weight`, in its dtype."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    out, channels, height, width = weight.shape
    rows, columns = dy.shape[2:]
    positions, wide, piece = len(x) * rows * columns, fitting(out, WIDE), fitting(width * channels)
    tall = triton.next_power_of_2(height)
    most = 4 * PROGRAMS if tall * piece <= FEW else PROGRAMS
    stages = stages_of(x, DEEP * (tall * piece + wide) * x.element_size())
    share = triton.cdiv(triton.cdiv(positions, DEEP), most)
    programs = triton.cdiv(triton.cdiv(positions, DEEP), share)
    sums = torch.empty(programs, height, width * channels, out, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        backward_kernel[programs, triton.cdiv(out, wide)](
            dy,
            x,
            sums,
            *(positions, share, rows, columns, out),
            *(channels, height, width),
            *(DEEP, wide, piece, tall),
            num_warps=WARPS,
            num_stages=stages,
        )
    whole = sums.sum(0).view(height, width, channels, out).permute(3, 2, 0, 1)
    return torch.empty_like(weight).copy_(whole)


@backward.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


@register_flop_formula([torch.ops.kitsune.stem_convolution, torch.ops.kitsune.stem_convolution_backward])
def _(first: Shape, second: Shape, *given: Any, out_shape: Any, **_: Any) -> int:
    """Of (x, weight) or (dy, x, weight)."""
    weight, y = (given[0], first) if given else (second, out_shape)
    return 2 * math.prod(y) * math.prod(weight[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], **_: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad
    dx = None
    if needs_x:
        window = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        dx, *_ = torch.ops.aten.convolution_backward(dy, x, weight, None, *window, (True, False, False))
    return dx, backward(dy, x, weight) if needs_weight else None


forward.register_autograd(_gradients, setup_context=_keep)


def fitting(size: int, most: int | None = None) -> int:
    """The least size of a tile that holds so many, a power of two; but at most `most`."""
    fits = max(LEAST, triton.next_power_of_2(size))
    return fits if most is None else min(fits, most)


def stages_of(x: torch.Tensor, stage_bytes: int) -> int:
    """As many stages as the shared memory of a multiprocessor holds, at most `STAGES`."""
    if not x.is_cuda:
        return 1
    shared_bytes: int = triton.runtime.driver.active.utils.get_device_properties(x.device.index)["max_shared_mem"]
    return max(1, min(STAGES, shared_bytes // stage_bytes))


@triton.jit
def corners_of(position, rows, columns, CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """Offset in the images of the window of each position of the result."""
    column, above = position % columns, position // columns
    return ((above // rows * (rows + KH - 1) + above % rows) * (columns + KW - 1) + column) * CHANNELS


@triton.jit
def forward_kernel(
    x, weight, y, positions, rows, columns, out,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    within = tl.arange(0, PIECE)
    is_piece, is_there, is_channel = within < KW * CHANNELS, (position < positions)[:, None], (channel < out)[None, :]
    at = corners_of(position, rows, columns, CHANNELS, KH, KW)[:, None] + within[None, :]
    total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    # Unrolled, so loads go through the first cache: windows overlap.
    for i in tl.static_range(KH):
        piece = tl.load(x + at + i * (columns + KW - 1) * CHANNELS, mask=is_there & is_piece[None, :], other=0.0)
        of_row = weight + (i * KW * CHANNELS + within)[:, None] * out + channel[None, :]
        total = tl.dot(piece, tl.load(of_row, mask=is_piece[:, None] & is_channel, other=0.0), total)
    tl.store(y + position[:, None] * out + channel[None, :], total.to(y.dtype.element_ty), mask=is_there & is_channel)


@triton.jit
def backward_kernel(
    dy, x, sums, positions, share, rows, columns, out,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program adds up the products of `share` tiles of positions, for all rows of the weight at once."""
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    within = tl.arange(0, ROWS * PIECE)
    i, of_row = within // PIECE, within % PIECE
    is_weight, is_channel = ((i < KH) & (of_row < KW * CHANNELS))[:, None], (channel < out)[None, :]
    piece = (i * (columns + KW - 1) * CHANNELS + of_row)[:, None]
    total = tl.zeros((ROWS * PIECE, WIDE), dtype=tl.float32)
    begin = tl.program_id(0) * share
    for tile in range(begin, begin + share):
        position = tile * DEEP + tl.arange(0, DEEP)
        is_there = position < positions
        at = corners_of(position, rows, columns, CHANNELS, KH, KW)[None, :] + piece
        pieces = tl.load(x + at, mask=is_there[None, :] & is_weight, other=0.0)
        slope = dy + position[:, None] * out + channel[None, :]
        slopes = tl.load(slope, mask=is_there[:, None] & is_channel, other=0.0)
        total = tl.dot(pieces, slopes, total)
    to = (tl.program_id(0) * KH + i) * (KW * CHANNELS) + of_row
    tl.store(sums + to[:, None] * out + channel[None, :], total, mask=is_weight & is_channel)
