"""Max pooling of images in training: the backward gathers, without atomics and without a pass that fills with zeros.

The forward saves, as one byte for each output, which element of its window was chosen. In the backward a program takes
blocks of stride x stride inputs. Which elements of which windows these are is known when the kernel is compiled, so
each output is compared only with the elements that its window has there.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import on_device_of, runs_in_triton
from kitsune.kernels.layouts import dense, in_layout_of, is_channels_last
from kitsune.kernels.tiles import fitting

#: The largest kernel and stride in each dimension: loops over them are unrolled.
MOST: Final = 5
#: The most elements of an image: offsets within one are int32, also those a tile beyond its end.
LARGEST_IMAGE: Final = 2**30
#: Elements of a tile: outputs in the forward, blocks of inputs in the backward.
TILE: Final = 1024
#: The most elements in a row of a tile: contiguous channels (128 bytes in half precision), or columns.
WIDEST_LAST: Final = 64
WIDEST_FIRST: Final = 256
#: The fewest rows and elements of a row, unless there are less: smaller tiles would keep few threads busy.
LEAST_HIGH: Final = 8
LEAST_WIDE: Final = 16
#: Bytes of the input that a warp loads at once. With more elements a thread, loads of them would have gaps.
WARP_BYTES: Final = 512

Pair = int | list[int] | tuple[int, ...]


def max_pool(x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair = 0) -> torch.Tensor:
    """The maximum of each window of `x` (n, c, h, w), as `F.max_pool2d` without dilation and `ceil_mode`.

    `kernel`, `stride` and `padding` are one number or (height, width). As in torch the first of equal elements gets the
    gradient, of several NaN the last, and padding is never chosen. The result (n, c, rows, columns) has the dtype of
    `x`, and is channels_last where `x` is, else contiguous. Gradients are added in fp32.

    `x` may be fp32, bf16 or fp16. Falls back to `reference` for kernels and strides above 5, images of more than 2**30
    elements, other numbers of dimensions, empty tensors, and where Triton cannot run. Raises RuntimeError where torch
    does, as for a padding above half the kernel.
    """
    window = tuple(pair_of(one) for one in (kernel, stride, padding))
    if not is_offered(x, *window):
        return reference(x, *window)
    y, _ = forward(x, *window)
    return y


def reference(x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair = 0) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    return F.max_pool2d(x.to(wide_of(x)), kernel, stride, padding).to(x.dtype)


def is_offered(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the kernels support it. Kernel, stride and padding are (height, width)."""
    if x.dim() != 4 or not x.numel() or x.numel() // x.shape[0] > LARGEST_IMAGE or not runs_in_triton(x):
        return False
    fits = all(1 <= one <= MOST for one in (*kernel, *stride))
    is_half = all(0 <= pad <= size // 2 for pad, size in zip(padding, kernel, strict=True))
    return fits and is_half and min(windows_of(x.shape, kernel, stride, padding)) > 0


def pair_of(value: Pair) -> tuple[int, ...]:
    """(height, width) of a number for both, or of a sequence of one or two."""
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * 2 if len(found) == 1 else found


def windows_of(
    shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    """(rows, columns) of windows in images of this shape (n, c, h, w)."""
    given = zip(shape[2:], kernel, stride, padding, strict=True)
    return tuple((size + 2 * pad - wide) // step + 1 for size, wide, step, pad in given)


def buffer_of(x: torch.Tensor, shape: Sequence[int], last: bool, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of this shape, channels_last if `last`, else contiguous."""
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty(*shape, dtype=dtype, device=x.device, memory_format=order)


@torch.library.custom_op("kitsune::max_pool", mutates_args=())
def forward(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the maxima, the number of the chosen element in its window in uint8), for arguments that `is_offered` accepts.

    Elements of a window are numbered row by row, those in the padding too.
    """
    x, last = dense(x), is_channels_last(x)
    y, chosen = results_of(x, kernel, stride, padding)
    plan = plan_of(y, y.shape[2:], last)
    sizes = (*x.shape[2:], *y.shape[2:], *plan.sizes)
    with on_device_of(x):
        forward_kernel[plan.grid](x, y, chosen, *sizes, *kernel, *stride, *padding, *plan.blocks, num_warps=plan.warps)
    return y, chosen


@forward.register_fake
def results_of(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the results of `forward`."""
    shape, last = (*x.shape[:2], *windows_of(x.shape, kernel, stride, padding)), is_channels_last(x)
    return buffer_of(x, shape, last, x.dtype), buffer_of(x, shape, last, torch.uint8)


@torch.library.custom_op("kitsune::max_pool_backward", mutates_args=())
def backward(
    dy: torch.Tensor,
    chosen: torch.Tensor,
    shape: Sequence[int],
    last: bool,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """The gradient of x, of this shape, in the dtype of `dy` and channels_last if `last`."""
    dx = buffer_of(dy, shape, last, dy.dtype)
    blocks = [triton.cdiv(size + pad % step, step) for size, step, pad in zip(shape[2:], stride, padding, strict=True)]
    plan = plan_of(dx, blocks, last)
    given, sizes = (in_layout_of(chosen, dy), chosen, dx), (*shape[2:], *dy.shape[2:], *plan.sizes)
    with on_device_of(dy):
        backward_kernel[plan.grid](*given, *sizes, *kernel, *stride, *padding, *plan.blocks, num_warps=plan.warps)
    return dx


@backward.register_fake
def _(dy: torch.Tensor, chosen: torch.Tensor, shape: Sequence[int], last: bool, *_: Any) -> torch.Tensor:
    return buffer_of(dy, shape, last, dy.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, *ctx.window = inputs
    _, chosen = output
    ctx.save_for_backward(chosen)
    ctx.shape, ctx.last = x.shape, is_channels_last(x)
    ctx.mark_non_differentiable(chosen)
    ctx.set_materialize_grads(False)  # avoids a tensor of zeros for the gradient of `chosen`


def _gradients(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    (chosen,) = ctx.saved_tensors
    return backward(dy, chosen, ctx.shape, ctx.last, *ctx.window), None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


class LaunchPlan(NamedTuple):
    """How a kernel is launched on tiles of an image (channels last) or of one of its channels (channels first)."""

    grid: tuple[int]
    sizes: tuple[int, ...]  # contiguous channels; tiles of a column, of a row, and of channels
    blocks: tuple[bool, int, int]  # whether channels are contiguous, rows and columns of a tile
    warps: int


def plan_of(x: torch.Tensor, counts: Sequence[int], last: bool) -> LaunchPlan:
    """One tile for each program: columns x channels of one row if `last`, else rows x columns of one channel.

    `x` is what the kernel writes, `counts` the number of (rows, columns) that are divided into tiles.
    """
    rows, columns = counts
    planes, channels = (x.shape[0], x.shape[1]) if last else (x.shape[0] * x.shape[1], 1)
    across, most = (channels, WIDEST_LAST) if last else (columns, WIDEST_FIRST)
    wide = fitting(across, most, LEAST_WIDE)
    high = fitting(columns if last else rows, TILE // wide, LEAST_HIGH)
    tiles = (rows, triton.cdiv(columns, high)) if last else (triton.cdiv(rows, high), triton.cdiv(columns, wide))
    lanes = triton.cdiv(channels, wide)
    warps = max(1, high * wide * x.element_size() // WARP_BYTES)
    return LaunchPlan((planes * tiles[0] * tiles[1] * lanes,), (channels, *tiles, lanes), (last, high, wide), warps)


@triton.jit
def tile_at(down, across, lanes, LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """(number of the image or plane, rows, columns, channels) of this program's tile."""
    lane, left = tl.program_id(0) % lanes, tl.program_id(0) // lanes % across
    top = tl.program_id(0) // lanes // across
    plane, top = (top // down).to(tl.int64), top % down
    if LAST:
        row, column = top, left * HIGH + tl.arange(0, HIGH)[:, None]
        channel = lane * WIDE + tl.arange(0, WIDE)[None, :]
    else:
        row, column = top * HIGH + tl.arange(0, HIGH)[:, None], left * WIDE + tl.arange(0, WIDE)[None, :]
        channel = tl.zeros((1, 1), dtype=tl.int32)
    return plane, row, column, channel


@triton.jit
def place_of(row, column, channel, height, width, channels):
    """(offset in a plane, whether it lies within)."""
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (channel < channels)
    return (row * width + column) * channels + channel, inside


@triton.jit
def forward_kernel(
    x, y, chosen, height, width, rows, columns, channels, down, across, lanes,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    plane, row, column, channel = tile_at(down, across, lanes, LAST, HIGH, WIDE)
    x += plane * height * width * channels
    most = tl.full((HIGH, WIDE), float("-inf"), dtype=tl.float32)
    number = tl.zeros((HIGH, WIDE), dtype=tl.int32)
    number += tl.maximum(PH - row * SH, 0) * KW + tl.maximum(PW - column * SW, 0)  # the first outside the padding
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            at, inside = place_of(row * SH - PH + i, column * SW - PW + j, channel, height, width, channels)
            value = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
            is_better = (value > most) | (value != value)  # as in torch: the first maximum, the last NaN
            # With a selection in place of this the kernel has a third more instructions, by ptxas for sm_90 in bf16.
            most = tl.maximum(most, value, propagate_nan=tl.PropagateNan.ALL)
            number = tl.where(is_better, i * KW + j, number)
    at, inside = place_of(row, column, channel, rows, columns, channels)
    results = plane * rows * columns * channels
    tl.store(y + results + at, most.to(y.dtype.element_ty), mask=inside)
    tl.store(chosen + results + at, number.to(tl.uint8), mask=inside)


@triton.jit
def backward_kernel(
    dy, chosen, dx, height, width, rows, columns, channels, down, across, lanes,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of each block of SH x SW inputs, element (a, b) is element (a + i * SH, b + j * SW) of the window that lies i
    rows above and j columns left of the last one that begins in the block. Stores come after all loads, so that the
    compiler may load a window once for all elements."""
    plane, row, column, channel = tile_at(down, across, lanes, LAST, HIGH, WIDE)
    results = plane * rows * columns * channels
    slopes = ()  # type: tuple[Any, ...]
    for a in tl.static_range(SH):
        for b in tl.static_range(SW):
            total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
            for i in tl.static_range((KH - a + SH - 1) // SH):
                for j in tl.static_range((KW - b + SW - 1) // SW):
                    window, left = row + PH // SH - i, column + PW // SW - j
                    at, inside = place_of(window, left, channel, rows, columns, channels)
                    number = tl.load(chosen + results + at, mask=inside, other=0)
                    slope = tl.load(dy + results + at, mask=inside, other=0.0).to(tl.float32)
                    total += tl.where(number == (a + i * SH) * KW + b + j * SW, slope, 0.0)
            slopes += (total.to(dx.dtype.element_ty),)
    dx += plane * height * width * channels
    for a in tl.static_range(SH):
        for b in tl.static_range(SW):
            to, inside = place_of(row * SH - PH % SH + a, column * SW - PW % SW + b, channel, height, width, channels)
            tl.store(dx + to, slopes[a * SW + b], mask=inside)
