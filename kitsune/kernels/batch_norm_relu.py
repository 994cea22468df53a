"""BatchNorm (Ioffe, Szegedy 2015) and ReLU in one pass, forward and backward, with channels first or last in memory.

Statistics are computed in two steps without atomics: each program reduces a share of a channel, then the shares are
combined by the formula of Chan, Golub, LeVeque 1979. The backward pass recomputes the ReLU's mask from the input, so
the output is not saved.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import block_of, on_device_of, runs_in_triton, warps_of
from kitsune.kernels.layouts import dense, in_layout_of, is_last
from kitsune.kernels.rows import add_shares, warps_of_tile

#: Elements of a tile, which a program holds in registers.
TILE = 4096
#: The most elements in a row of a tile: contiguous channels (128 bytes in half precision), or positions.
WIDEST_LAST, WIDEST_FIRST = 64, 1024
#: Programs of a reduction: four for each multiprocessor of an H200. No channel has more shares.
PROGRAMS = 512
#: Channels whose shares one program combines.
COMBINED = 16


def batch_norm_relu(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool = True,
) -> torch.Tensor:
    """`x` (n, c, *) normalised in each channel, times `weight` (c,), plus `bias` (c,), with a ReLU if `relu`.

    In `training` it uses the statistics of `x` and moves the running ones (c,) towards them by `momentum`; else it uses
    the running ones. The result has the dtype and memory format of `x`, or is contiguous where that is neither
    contiguous nor channels_last. Sums are in fp32. Falls back to `reference` where Triton cannot run, without weight or
    bias, with less than two elements in a channel, and for arguments for which torch raises an error.
    """
    own = (weight, bias) if training else (weight, bias, running_mean, running_var)
    vectors = (weight, bias, running_mean, running_var)
    fits = all(one is not None for one in own) and all(one is None or is_vector_of(x, one) for one in vectors)
    if not fits or x.numel() <= x.shape[1] or not runs_in_triton(x, *vectors):
        return reference(x, *vectors, training, momentum, eps, relu)
    mean, variance = statistics(x.detach(), *vectors[2:], momentum) if training else vectors[2:]
    return forward(x, weight, bias, mean, variance, eps, training, relu)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool = True,
) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    dtype = wide_of(x)
    vectors = (running_mean, running_var, weight, bias)
    mean, variance, factor, shift = (None if one is None else one.to(dtype) for one in vectors)
    y = F.batch_norm(x.to(dtype), mean, variance, factor, shift, training, momentum, eps)
    for running, moved in ((running_mean, mean), (running_var, variance)):
        if training and running is not None and moved is not None and running is not moved:
            running.copy_(moved)
    return (F.relu(y) if relu else y).to(x.dtype)


@torch.library.custom_op("kitsune::batch_norm_statistics", mutates_args=("running_mean", "running_var"))
def statistics(
    x: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) of each channel in fp32, without gradients. Updates the running ones as torch does."""
    x, channels = dense(x), x.shape[1]
    plan = reduction_of(x)
    shares = plan.grid[1]
    partial = x.new_empty(3, shares, channels, dtype=torch.float32)
    mean, variance = vector_of(x), vector_of(x)
    block, grid = triton.next_power_of_2(shares), (triton.cdiv(channels, COMBINED),)
    kept, warps = (mean, variance, running_mean, running_var), warps_of(block * COMBINED)
    with on_device_of(x):
        statistics_kernel[plan.grid](x, *partial, *plan.sizes, *plan.blocks, num_warps=plan.warps)
        combine_kernel[grid](*partial, *kept, momentum, shares, channels, block, COMBINED, num_warps=warps)
    return mean, variance


@torch.library.custom_op("kitsune::batch_norm_relu", mutates_args=())
def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
    training: bool,
    relu: bool,
) -> torch.Tensor:
    """The output for given statistics. `training`: they are those of `x`, which matters for its gradient."""
    x = dense(x)
    y, plan = torch.empty_like(x), plan_of(x)
    given = (x, weight, bias, mean, variance)
    with on_device_of(x):
        forward_kernel[plan.grid](*given, y, *plan.sizes, eps, relu, *plan.blocks, num_warps=plan.warps)
    return y


@forward.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(dense(x))


@torch.library.custom_op("kitsune::batch_norm_relu_sums", mutates_args=())
def backward_sums(
    dy: torch.Tensor, x: torch.Tensor, vectors: list[torch.Tensor], eps: float, relu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of weight, gradient of bias), both in fp32. `vectors`: weight, bias, mean and variance."""
    x = dense(x)
    plan, dweight, dbias = reduction_of(x), vector_of(x), vector_of(x)
    partial = x.new_empty(2, plan.grid[1], x.shape[1], dtype=torch.float32)
    given = (in_layout_of(x, dy), x, *vectors, *partial)
    with on_device_of(x):
        backward_sums_kernel[plan.grid](*given, *plan.sizes, eps, relu, *plan.blocks, num_warps=plan.warps)
    add_shares(dweights=partial[0], dweight=dweight, dbiases=partial[1], dbias=dbias)
    return dweight, dbias


@statistics.register_fake
@backward_sums.register_fake
def _(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return vector_of(x), vector_of(x)


@torch.library.custom_op("kitsune::batch_norm_relu_dx", mutates_args=())
def backward_dx(
    dy: torch.Tensor, x: torch.Tensor, vectors: list[torch.Tensor], sums: list[torch.Tensor], eps: float, relu: bool
) -> torch.Tensor:
    """The gradient of x. `sums` are those of `backward_sums`, or None where the statistics do not depend on x."""
    x = dense(x)
    dx, plan = torch.empty_like(x), plan_of(x)
    given = (in_layout_of(x, dy), x, *vectors, *(sums or (None, None)), dx)
    count = x.numel() // x.shape[1]
    with on_device_of(x):
        backward_dx_kernel[plan.grid](*given, *plan.sizes, count, eps, relu, *plan.blocks, num_warps=plan.warps)
    return dx


@backward_dx.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(dense(x))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.eps, ctx.training, ctx.relu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, *vectors = ctx.saved_tensors
    sums: list[torch.Tensor] = []
    if ctx.training or any(ctx.needs_input_grad[1:3]):
        sums = list(backward_sums(dy, x, vectors, ctx.eps, ctx.relu))
    through = sums if ctx.training else []
    dx = backward_dx(dy, x, vectors, through, ctx.eps, ctx.relu) if ctx.needs_input_grad[0] else None
    own = [one.to(of.dtype) for one, of in zip(sums, vectors[:2], strict=True)] if sums else [None, None]
    return dx, *own, None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def is_vector_of(x: torch.Tensor, one: torch.Tensor) -> bool:
    """Whether it has one element for each channel and is contiguous."""
    return x.dim() > 1 and one.shape == x.shape[1:2] and one.is_contiguous()


def vector_of(x: torch.Tensor) -> torch.Tensor:
    """An fp32 buffer of one number for each channel."""
    return x.new_empty(x.shape[1], dtype=torch.float32)


class LaunchPlan(NamedTuple):
    """How a kernel is launched on tiles of x."""

    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[bool, int, int]  # whether channels are contiguous, rows and columns of a tile
    warps: int


def plan_of(x: torch.Tensor) -> LaunchPlan:
    """One tile for each program. x is seen as batches of a matrix: (n, c, positions), or (1, n * positions, c)."""
    last, channels, positions = is_last(x), x.shape[1], x.numel() // x.shape[1]
    batches, rows, columns = (1, positions, channels) if last else (x.shape[0], channels, positions // x.shape[0])
    high, wide = tile_of(rows, columns, last)
    down, across = triton.cdiv(rows, high), triton.cdiv(columns, wide)
    warps = warps_of_tile if last else warps_of  # with contiguous channels one load of their data serves more elements
    sizes, grid = (channels, rows, columns, down, across), (batches * down * across,)
    return LaunchPlan(grid, sizes, (last, high, wide), warps(high * wide))


def reduction_of(x: torch.Tensor) -> LaunchPlan:
    """For each channel, or each tile of contiguous channels, a share of its tiles for each program."""
    last, channels, positions = is_last(x), x.shape[1], x.numel() // x.shape[1]
    rows, columns = (positions, 1) if last else (x.shape[0], positions // x.shape[0])
    high, wide = tile_of(rows, channels if last else columns, last)
    lanes = triton.cdiv(channels, wide) if last else channels
    across = triton.cdiv(columns, wide)
    tiles = triton.cdiv(rows, high) * across
    share = triton.cdiv(tiles, triton.cdiv(PROGRAMS, lanes))
    sizes, grid = (channels, rows, columns, across, tiles, share), (lanes, triton.cdiv(tiles, share))
    return LaunchPlan(grid, sizes, (last, high, wide), warps_of_tile(high * wide))


def tile_of(rows: int, columns: int, last: bool) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    wide = min(block_of(columns), WIDEST_LAST if last else WIDEST_FIRST)
    return min(triton.next_power_of_2(rows), TILE // wide), wide


@triton.jit
def in_grid(channels, rows, columns, down, across, LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """(offsets, their mask, channels, their mask) of this program's tile."""
    left, top = tl.program_id(0) % across * WIDE, tl.program_id(0) // across
    column = left + tl.arange(0, WIDE)
    if LAST:
        row = top.to(tl.int64) * HIGH + tl.arange(0, HIGH)
        at, channel = (row * columns)[:, None] + column, column
    else:
        row = top % down * HIGH + tl.arange(0, HIGH)
        at, channel = (((top // down).to(tl.int64) * rows + row) * columns)[:, None] + column, row
    return at, (row < rows)[:, None] & (column < columns), channel, channel < channels


@triton.jit
def in_lane(tile, channels, rows, columns, across, LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """(offsets, their mask, number of elements of each channel) of a tile of this program's channels."""
    top, left = tl.cast(tile // across, tl.int64) * HIGH, tile % across * WIDE
    row, count = top + tl.arange(0, HIGH), tl.minimum(rows - top, HIGH)
    if LAST:
        column, columns = tl.program_id(0) * WIDE + tl.arange(0, WIDE), channels
        at = (row * channels)[:, None] + column
    else:
        column = left + tl.arange(0, WIDE)
        at = ((row * channels + tl.program_id(0)) * columns)[:, None] + column
        count *= tl.minimum(columns - left, WIDE)
    return at, (row < rows)[:, None] & (column < columns), count


@triton.jit
def load(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_across(pointer, channel, valid, LAST: tl.constexpr):
    """Loads per-channel values for a tile, broadcast along its columns or its rows."""
    return load(pointer, channel, valid)[None, :] if LAST else load(pointer, channel, valid)[:, None]


@triton.jit
def sum_of_channels(tile, LAST: tl.constexpr):
    return tl.sum(tile, 0) if LAST else tl.sum(tile)


@triton.jit(do_not_specialize=["rows", "tiles", "share"])
def statistics_kernel(
    x, counts, means, squares, channels, rows, columns, across, tiles, share,
    LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Count, mean and sum of squared deviations of a share of each channel. Sums are relative to the mean of the first
    tile, so the error is at most one unit in the last place for each tile, for any data."""
    first = tl.program_id(1) * share
    at, inside, count = in_lane(first, channels, rows, columns, across, LAST, HIGH, WIDE)
    about = sum_of_channels(load(x, at, inside), LAST) / count
    total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    square = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    number = tl.zeros_like(count)
    for tile in range(first, tl.minimum(first + share, tiles)):
        at, inside, count = in_lane(tile, channels, rows, columns, across, LAST, HIGH, WIDE)
        away = tl.where(inside, load(x, at, inside) - about, 0.0)
        total += away
        square += away * away
        number += count
    shift = sum_of_channels(total, LAST) / number
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE) if LAST else tl.program_id(0)
    to, valid = tl.program_id(1) * channels + channel, channel < channels
    tl.store(counts + to, number.to(tl.float32), mask=valid)
    tl.store(means + to, about + shift, mask=valid)
    tl.store(squares + to, sum_of_channels(square, LAST) - shift * shift * number, mask=valid)


@triton.jit(do_not_specialize=["shares"])
def combine_kernel(
    counts, means, squares, mean, variance, running_mean, running_var, momentum, shares, channels,
    SHARES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Combines all shares of some channels relative to the mean of the first, so a large mean adds no further error."""
    share, channel = tl.arange(0, SHARES)[:, None], tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid = channel < channels
    at, inside = share * channels + channel, (share < shares) & valid
    number, center = load(counts, at, inside), load(means, at, inside)
    count, about = tl.maximum(tl.sum(number, 0), 1.0), load(means, channel, valid)
    middle = about + tl.sum(number * (center - about), 0) / count
    apart = number * (center - middle) * (center - middle)
    square = tl.maximum(tl.sum(load(squares, at, inside) + apart, 0), 0.0)
    tl.store(mean + channel, middle, mask=valid)
    tl.store(variance + channel, square / count, mask=valid)
    if running_mean is not None:
        move(running_mean, channel, valid, middle, momentum)
    if running_var is not None:
        move(running_var, channel, valid, square / tl.maximum(count - 1.0, 1.0), momentum)


@triton.jit
def move(running, channel, valid, value, momentum):
    after = (1.0 - momentum) * load(running, channel, valid) + momentum * value
    tl.store(running + channel, after.to(running.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows", "down"])
def forward_kernel(
    x, weight, bias, mean, variance, y, channels, rows, columns, down, across, eps, RELU: tl.constexpr,
    LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at, inside, channel, valid = in_grid(channels, rows, columns, down, across, LAST, HIGH, WIDE)
    scale = tl.rsqrt(load_across(variance, channel, valid, LAST) + eps)
    normal = (load(x, at, inside) - load_across(mean, channel, valid, LAST)) * scale
    result = normal * load_across(weight, channel, valid, LAST) + load_across(bias, channel, valid, LAST)
    if RELU:
        result = tl.where(result <= 0, 0.0, result)  # keeps NaN, as torch does
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles", "share"])
def backward_sums_kernel(
    dy, x, weight, bias, mean, variance, dweights, dbiases, channels, rows, columns, across, tiles, share, eps,
    RELU: tl.constexpr, LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE) if LAST else tl.program_id(0)
    valid = channel < channels
    middle, scale = load(mean, channel, valid), tl.rsqrt(load(variance, channel, valid) + eps)
    factor, shift = load(weight, channel, valid), load(bias, channel, valid)
    dweight = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    dbias = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    first = tl.program_id(1) * share
    for tile in range(first, tl.minimum(first + share, tiles)):
        at, inside, _ = in_lane(tile, channels, rows, columns, across, LAST, HIGH, WIDE)
        normal, slope = (load(x, at, inside) - middle) * scale, load(dy, at, inside)
        if RELU:
            slope = tl.where(normal * factor + shift <= 0, 0.0, slope)
        dweight += slope * normal
        dbias += slope
    to = tl.program_id(1) * channels + channel
    tl.store(dweights + to, sum_of_channels(dweight, LAST), mask=valid)
    tl.store(dbiases + to, sum_of_channels(dbias, LAST), mask=valid)


@triton.jit(do_not_specialize=["rows", "down", "count"])
def backward_dx_kernel(
    dy, x, weight, bias, mean, variance, dweight, dbias, dx, channels, rows, columns, down, across, count, eps,
    RELU: tl.constexpr, LAST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at, inside, channel, valid = in_grid(channels, rows, columns, down, across, LAST, HIGH, WIDE)
    scale = tl.rsqrt(load_across(variance, channel, valid, LAST) + eps)
    factor, middle = load_across(weight, channel, valid, LAST), load_across(mean, channel, valid, LAST)
    normal, slope = (load(x, at, inside) - middle) * scale, load(dy, at, inside)
    if RELU:
        slope = tl.where(normal * factor + load_across(bias, channel, valid, LAST) <= 0, 0.0, slope)
    if dweight is not None:
        slope -= load_across(dbias, channel, valid, LAST) / count
        slope -= load_across(dweight, channel, valid, LAST) / count * normal
    tl.store(dx + at, (slope * factor * scale).to(dx.dtype.element_ty), mask=inside)
