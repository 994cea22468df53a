"""An activation of x + bias in one pass: GELU (Hendrycks, Gimpel 2016) exact, by tanh and by sigmoid, SiLU or ReLU.

The backward pass recomputes the slope from x and the bias, so only the inputs are saved. The gradient of the bias is
summed in two steps in a fixed order, without atomics, so it is bitwise reproducible.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import count, on_device_of, runs_in_triton, warps_of
from kitsune.kernels.tiles import shares_of, tile_of

#: Programs of a backward pass that sums over rows: eight for each multiprocessor of an H200, all resident at once.
PROGRAMS: Final = 1056

#: Kind -> its eager implementation.
KINDS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def bias_activation(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """The activation `kind` of `x` (..., n) + `bias` (n,) or None, in the dtype of `x`.

    `kind` is "gelu" (by erf), "gelu_tanh", "silu", "relu" or "quick_gelu" (of CLIP, by sigmoid); any other raises
    ValueError. Computes in fp32. Falls back to `reference` where Triton cannot run, and for a bias of another shape.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no activation that is known here; choose one of {', '.join(KINDS)}")
    if (bias is not None and bias.shape != x.shape[-1:]) or not runs_in_triton(x, bias):
        return reference(x, bias, kind)
    return forward(x, bias, kind)


def reference(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = x.to(wide_of(x))
    return KINDS[kind](wide if bias is None else wide + bias.to(wide.dtype)).to(x.dtype)


@torch.library.custom_op("kitsune::bias_activation", mutates_args=())
def forward(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """The activation, contiguous."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        rows, columns = sizes(x, bias)
        high, wide = tile_of(rows, columns)
        programs = triton.cdiv(rows, high) * triton.cdiv(columns, wide)
        given = None if bias is None else bias.contiguous()
        with on_device_of(x):
            forward_kernel[(programs,)](x, given, y, rows, columns, kind, high, wide, num_warps=warps_of(high * wide))
    return y


@forward.register_fake
def _(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("kitsune::bias_activation_backward", mutates_args=())
def backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x, gradient of bias: empty without one), each in the dtype of its input."""
    dy, x, given = dy.contiguous(), x.contiguous(), x.new_empty(0) if bias is None else bias.contiguous()
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(given)
    rows, columns = sizes(x, bias)
    high, wide = tile_of(rows, columns)
    across = triton.cdiv(columns, wide)
    shares, share = shares_of(triton.cdiv(rows, high), across, PROGRAMS)
    partial = None if bias is None else torch.empty(shares, columns, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        backward_kernel[(shares * across,)](
            dy,
            x,
            None if bias is None else given,
            dx,
            partial,
            rows,
            columns,
            share,
            kind,
            high,
            wide,
            num_warps=warps_of(high * wide),
        )
    return dx, torch.empty_like(given) if partial is None else partial.sum(0).to(given.dtype)


@backward.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    like = x.new_empty(0) if bias is None else bias
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(like, memory_format=torch.contiguous_format),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias = backward(dy, x, bias, ctx.kind)
    return dx, None if bias is None else dbias, None


forward.register_autograd(_gradients, setup_context=_keep)


def sizes(x: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    """(rows, columns) of `x` for the kernels: one row without a bias, since then nothing depends on the column."""
    return (1, x.numel()) if bias is None else count(x)


@triton.jit
def forward_kernel(x, bias, y, rows, columns, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, activated(value, KIND).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy,
    x,
    bias,
    dx,
    partial,
    rows,
    columns,
    share,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    part = (program // across).to(tl.int64)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if bias is not None:
        offset = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(part * share, tl.minimum(part * share + share, tl.cdiv(rows, ROWS))):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += offset
        dvalue = pulled_back(dvalue, value, KIND)
        total += dvalue
        tl.store(dx + row * columns + column, dvalue.to(dx.dtype.element_ty), mask=inside)
    if bias is not None:
        tl.store(partial + part * columns + column, tl.sum(total, axis=0, keep_dims=True), mask=column < columns)


@triton.jit
def activated(value, KIND: tl.constexpr):
    if KIND == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        result = value * tl.sigmoid(twice_the_inner(value))
    elif KIND == "silu":
        result = value * tl.sigmoid(value)
    elif KIND == "quick_gelu":
        result = value * tl.sigmoid(1.702 * value)
    else:
        result = tl.where(value < 0.0, 0.0, value)  # not a maximum: NaN stays NaN
    return result


@triton.jit
def pulled_back(dvalue, value, KIND: tl.constexpr):
    """`dvalue` times the slope of the activation at `value`."""
    if KIND == "gelu":
        share = 0.5 + 0.5 * tl.erf(value * 0.7071067811865476)
        result = dvalue * (share + value * tl.exp(-0.5 * value * value) * 0.3989422804014327)
    elif KIND == "gelu_tanh":
        share = tl.sigmoid(twice_the_inner(value))
        slope = 1.5957691216057308 + 0.21406444881780073 * value * value
        bent = share * (1.0 - share)  # 0 for large values, where the other factors overflow
        result = dvalue * (share + tl.where(bent == 0.0, 0.0, value * bent * slope))
    elif KIND == "silu":
        share = tl.sigmoid(value)
        result = dvalue * share * (1.0 + value * (1.0 - share))
    elif KIND == "quick_gelu":
        share = tl.sigmoid(1.702 * value)
        result = dvalue * (share + 1.702 * (value * share * (1.0 - share)))
    else:
        result = tl.where(value <= 0.0, 0.0, dvalue)
    return result


@triton.jit
def twice_the_inner(value):
    """2 u for the tanh form x (1 + tanh(u)) / 2, which is x sigmoid(2 u): u = sqrt(2 / pi) (x + 0.044715 x**3)."""
    return 1.5957691216057308 * value * (1.0 + 0.044715 * value * value)


@triton.jit
def activated_with_slope(value, KIND: tl.constexpr):
    """(the activation at `value`, its slope there), as exact as half precision is: products wait for the instructions.

    For Hopper they are 18 by element for "gelu", 16 for "gelu_tanh" and 10 for "silu", with loads and stores. A minimum
    keeps large factors from what the share may lack of 1.
    """
    if KIND == "gelu":
        reach = tl.minimum(tl.abs(value), 6.0)
        share, density = share_beyond(reach), tl.exp2(-0.7213475204444817 * reach * reach - 1.3257480647361593)
        below = share - reach * density
        result = tl.where(value < 0.0, 0.0, value) - reach * share
        slope = tl.where(value < 0.0, below, 1.0 - below)
    elif KIND == "gelu_tanh":
        square = tl.minimum(value * value, 400.0)
        share = inverse_of(1.0 + tl.exp2(-value * (2.302208198144325 + 0.1029432395800235 * square)))
        result = value * share
        bend = 1.5957691216057308 + 0.21406444881780073 * square
        slope = share + tl.minimum(value, 20.0) * (share - share * share) * bend
    elif KIND == "silu":
        share = inverse_of(1.0 + tl.exp2(-1.4426950408889634 * value))
        result = value * share
        slope = share + tl.minimum(result, 20.0) * (1.0 - share)
    elif KIND == "quick_gelu":
        share = inverse_of(1.0 + tl.exp2(-2.4554669595930156 * value))
        result = value * share
        slope = share + 1.702 * tl.minimum(result, 20.0) * (1.0 - share)
    else:
        result, slope = activated(value, KIND), pulled_back(1.0, value, KIND)
    return result, slope


@triton.jit
def inverse_of(value):
    """1 / value, from 1 on, to a relative error of 1e-6: a division takes four instructions more."""
    root = tl.rsqrt(value)
    return root * root


@triton.jit
def share_beyond(reach):
    """The share of a normal distribution beyond `reach`, from 0 to 6, to a relative error of 6e-6.

    A polynomial fitted to its logarithm takes half as many instructions as erf, and the products wait for them.
    """
    power = -1.8348113415161609e-06 * reach + 6.15982864750342e-05
    power = power * reach - 0.0009305247404038207
    power = power * reach + 0.008507890256866718
    power = power * reach - 0.05396006714803322
    power = power * reach - 0.4584643962133985
    power = power * reach - 1.151251043254666
    return tl.exp2(power * reach - 0.9999952948358146)
