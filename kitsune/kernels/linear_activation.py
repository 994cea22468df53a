"""The block of a transformer between two residuals, linear2(activation(linear1(x))), without passes of the activation.

The forward applies the activation to each tile of the first product, and stores its results and its slopes. The
backward multiplies each tile of the activation's gradient by them, and sums its columns for the gradient of the bias.
All other products are torch's own. On Hopper linear_activation_hopper does the same for large results. Sums go in a
fixed order, without atomics, so results are bitwise reproducible.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels.bias_activation import KINDS, activated_with_slope
from kitsune.kernels.launch import IS_INTERPRETED, runs_in_triton
from kitsune.kernels.layouts import Shape
from kitsune.kernels.products import (
    ALIGNED,
    HAS_GLUON,
    HOPPER,
    OFFERED,
    Tiling,
    described,
    halves_of,
    in_rows,
    launch,
    place_of,
    sides,
    takes_turns,
    tile_of,
    with_product,
)

if HAS_GLUON:
    from kitsune.kernels import linear_activation_hopper

#: The fastest of 14 tilings on an H200, in five shapes of models.
FORWARD: Final = Tiling(high=128, wide=128, deep=64, pieces=2, stages=3, warps=8, programs=2, registers=128)
BACKWARD: Final = Tiling(high=128, wide=128, deep=64, pieces=2, stages=3, warps=4, programs=2)
#: Of each multiprocessor, for the forward in Gluon. Of fewer it is faster by itself, but leaves no room for launches on
#: other streams: with 2.9 (BERT-base, 16 x 128 tokens, an H200) a step took 4.17 ms in place of 4.05.
LEAST_TILES: Final = 4


def mlp(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor, b2: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """The linear layer `w2` (out, hidden), `b2` (out,) of the activation of layer `w1` (hidden, n), `b1` of x (..., n).

    `kind` is that of the activation, one of `bias_activation`'s; any other raises ValueError. A bias may be None. Both
    layers' results, the activation's and its slopes are rounded to the dtype.

    Falls back to `reference` where `is_offered` is False.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no activation that is known here; choose one of {', '.join(KINDS)}")
    if not is_offered(x, w1, b1, w2, b2):
        return reference(x, w1, b1, w2, b2, kind)
    y: torch.Tensor = Mlp.apply(x.reshape(-1, x.shape[-1]), w1, b1, w2, b2, kind)
    return y.view(*x.shape[:-1], w2.shape[0])


def reference(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor, b2: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """`mlp` in eager torch: what a model computes without this kernel."""
    return F.linear(KINDS[kind](F.linear(x, w1, b1)), w2, b2)


def is_offered(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor, b2: torch.Tensor | None
) -> bool:
    """Whether the kernels compute it: in half precision, on Hopper or newer, with rows of a multiple of 16 bytes."""
    given = [tensor for tensor in (x, w1, b1, w2, b2) if tensor is not None]
    return (
        runs_in_triton(*given)
        and all(tensor.dtype == x.dtype and tensor.device == x.device for tensor in given)
        and x.dtype in OFFERED
        and x.ndim > 0
        and w1.ndim == w2.ndim == 2
        and (x.shape[-1], w1.shape[0]) == (w1.shape[1], w2.shape[1])
        and all(bias is None or bias.shape == weight.shape[:1] for weight, bias in ((w1, b1), (w2, b2)))
        and all(n > 0 and n * x.element_size() % ALIGNED == 0 for n in (*w1.shape, w2.shape[0]))
        and (IS_INTERPRETED or torch.cuda.get_device_properties(x.device).major >= HOPPER)
    )


class Mlp(torch.autograd.Function):
    """One node, since the first product's gradient needs that of the second's result."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        kind: str,
    ) -> torch.Tensor:
        a, slopes = forward(x, w1, b1, kind)
        ctx.save_for_backward(x, w1, w2, a, slopes)
        return F.linear(a, w2, b2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w1, w2, a, slopes = ctx.saved_tensors
        needs_x, needs_w1, needs_b1, needs_w2, needs_b2, _ = ctx.needs_input_grad
        dx = dw1 = db1 = None
        if needs_x or needs_w1 or needs_b1:
            dh, sums = backward(dy, w2, slopes)
            dx = dh @ w1 if needs_x else None
            dw1 = gradient_of(w1, dh, x) if needs_w1 else None
            db1 = sums.sum(0).to(dh.dtype) if needs_b1 else None
        return dx, dw1, db1, gradient_of(w2, dy, a) if needs_w2 else None, dy.sum(0) if needs_b2 else None, None


def gradient_of(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight (out, n) of a layer of x, laid out as the weight is."""
    return (x.t() @ dy).t() if weight.stride(0) < weight.stride(1) else dy.t() @ x


@torch.library.custom_op("kitsune::linear_activation", mutates_args=())
def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the activation of `x` (rows, n) times the transpose of `weight` (hidden, n) plus `bias`, its slopes there)."""
    a = x.new_empty(len(x), len(weight))
    slopes = torch.empty_like(a)
    bias = None if bias is None else bias.contiguous()
    if takes_turns(a, FORWARD, LEAST_TILES) and kind in linear_activation_hopper.FASTER:
        linear_activation_hopper.forward(x, weight, bias, a, slopes, kind)
    elif a.numel():
        high, wide, deep, pieces, *_ = FORWARD
        right, is_transposed = in_rows(weight.t())
        launch(
            forward_kernel,
            FORWARD,
            a,
            x.shape[1],
            described(x, high, deep),
            described(right, *sides(deep, wide, is_transposed)),
            bias,
            described(a, high, wide // pieces),
            described(slopes, high, wide // pieces),
            kind,
            is_transposed,
        )
    return a, slopes


@forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    a = x.new_empty(x.shape[0], weight.shape[0])
    return a, torch.empty_like(a)


@torch.library.custom_op("kitsune::linear_activation_backward", mutates_args=())
def backward(dy: torch.Tensor, weight: torch.Tensor, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient before the activation (rows, hidden), its sums over the rows of each tile, in fp32).

    `dy` (rows, out) is the gradient of the layer `weight` (out, hidden) of the activation with these slopes.
    """
    dh = torch.empty_like(slopes)
    sums = slopes.new_empty(triton.cdiv(len(slopes), BACKWARD.high), slopes.shape[1], dtype=torch.float32)
    if takes_turns(dh, BACKWARD):
        linear_activation_hopper.backward(dy, weight, slopes, dh, sums)
    elif dh.numel():
        high, wide, deep, pieces, *_ = BACKWARD
        right, is_transposed = in_rows(weight)
        launch(
            backward_kernel,
            BACKWARD,
            dh,
            dy.shape[1],
            described(dy, high, deep),
            described(right, *sides(deep, wide, is_transposed)),
            described(slopes, high, wide // pieces),
            described(dh, high, wide // pieces),
            sums,
            is_transposed,
        )
    return dh, sums


@backward.register_fake
def _(dy: torch.Tensor, weight: torch.Tensor, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = (slopes.shape[0] + BACKWARD.high - 1) // BACKWARD.high
    return torch.empty_like(slopes), slopes.new_empty(tiles, slopes.shape[1], dtype=torch.float32)


@register_flop_formula(torch.ops.kitsune.linear_activation)
def _(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * math.prod(weight)


@register_flop_formula(torch.ops.kitsune.linear_activation_backward)
def _(dy: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * dy[0] * math.prod(weight)


@triton.jit(do_not_specialize=["rows", "programs"])
def forward_kernel(
    x,
    right,
    bias,
    a,
    slopes,
    KIND: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    rows,
    columns,
    inner,
    programs,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PIECES: tl.constexpr,
):
    tl.assume(inner > 0)  # else the code for no products at all is there as well
    first = tl.program_id(0)
    # A second counter for what follows the product: the loads of the next tile begin before this one is stored.
    stored = first - programs
    for tile in tl.range(first, tl.cdiv(rows, HIGH) * tl.cdiv(columns, WIDE), programs, flatten=True):
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        for step in range(tl.cdiv(inner, DEEP)):
            at = step * DEEP
            total = with_product(total, x.load([row, at]), tile_of(right, at, column, IS_TRANSPOSED))
        stored += programs
        row, column = place_of(stored, rows, columns, HIGH, WIDE)
        store_results(total, bias, a, slopes, row, column, columns, KIND, WIDE, PIECES)


@triton.jit
def store_results(
    total, bias, a, slopes, row, column, columns, KIND: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr
):
    """Stores a tile of `a` and of `slopes`."""
    if PIECES > 1:
        left, right = halves_of(total)
        store_results(left, bias, a, slopes, row, column, columns, KIND, WIDE // 2, PIECES // 2)
        store_results(right, bias, a, slopes, row, column + WIDE // 2, columns, KIND, WIDE // 2, PIECES // 2)
    else:
        if bias is not None:
            at = column + tl.arange(0, WIDE)
            total += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
        value, slope = activated_with_slope(total.to(a.dtype).to(tl.float32), KIND)
        a.store([row, column], value.to(a.dtype))
        slopes.store([row, column], slope.to(slopes.dtype))


@triton.jit(do_not_specialize=["rows", "programs"])
def backward_kernel(
    dy,
    right,
    slopes,
    dh,
    sums,
    IS_TRANSPOSED: tl.constexpr,
    rows,
    columns,
    inner,
    programs,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PIECES: tl.constexpr,
):
    for tile in range(tl.program_id(0), tl.cdiv(rows, HIGH) * tl.cdiv(columns, WIDE), programs):
        row, column = place_of(tile, rows, columns, HIGH, WIDE)
        total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
        for step in range(tl.cdiv(inner, DEEP)):
            at = step * DEEP
            total = with_product(total, dy.load([row, at]), tile_of(right, at, column, IS_TRANSPOSED))
        store_gradients(total, slopes, dh, sums + row // HIGH * columns, row, column, columns, WIDE, PIECES)


@triton.jit
def store_gradients(total, slopes, dh, sums, row, column, columns, WIDE: tl.constexpr, PIECES: tl.constexpr):
    """Stores a tile of `dh` and its sums. Rows beyond the end are zeros, so they add nothing."""
    if PIECES > 1:
        left, right = halves_of(total)
        store_gradients(left, slopes, dh, sums, row, column, columns, WIDE // 2, PIECES // 2)
        store_gradients(right, slopes, dh, sums, row, column + WIDE // 2, columns, WIDE // 2, PIECES // 2)
    else:
        value = total * slopes.load([row, column]).to(tl.float32)
        dh.store([row, column], value.to(dh.dtype))
        at = column + tl.arange(0, WIDE)
        tl.store(sums + at, tl.sum(value, axis=0), mask=at < columns)
