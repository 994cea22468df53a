"""LayerNorm over the last dimension (Ba, Kiros, Hinton 2016), forward and backward in one pass over each row.

A row stays in registers, so its variance is computed from deviations from the mean, and is accurate for a large mean
too. The gradients of weight and bias are summed in two steps in a fixed order, without atomics, so they are bitwise
reproducible.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import are_rows, count, on_device_of, runs_in_triton
from kitsune.kernels.rows import add_shares, buffer_of, partials_of, shares_of, tile_of


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(`x` - mean) / standard deviation along the last dimension n, times `weight` (n,), plus `bias` (n,).

    fp32, bf16 and fp16 in any mix; the result has the dtype of `x`, sums are in fp32. Falls back to `reference` for
    rows of more than 65536 elements, weights of another shape (for which torch raises its error), and where Triton
    cannot run.
    """
    if not (are_rows(x, weight, bias) and runs_in_triton(x, weight, bias)):
        return reference(x, weight, bias, eps)
    y, _, _ = forward(x, weight, bias, eps)
    return y


def reference(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = wide_of(x)
    factor, shift = (None if one is None else one.to(wide) for one in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], factor, shift, eps).to(x.dtype)


@torch.library.custom_op("kitsune::layer_norm", mutates_args=())
def forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean of each row, 1 / standard deviation of each row), the last two in fp32."""
    x = x.contiguous()
    weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))
    rows, columns = count(x)
    y = torch.empty_like(x)
    means, scales = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if x.numel():
        high, block, warps = tile_of(rows, columns)
        grid = (triton.cdiv(rows, high),)
        with on_device_of(x):
            forward_kernel[grid](x, weight, bias, y, means, scales, rows, columns, eps, high, block, num_warps=warps)
    return y, means, scales


@forward.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    means, scales = (x.new_empty(count(x)[0], dtype=torch.float32) for _ in range(2))
    return buffer_of(x, x), means, scales


@torch.library.custom_op("kitsune::layer_norm_backward", mutates_args=())
def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    means: torch.Tensor,
    scales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of x, of weight, of bias), each in the dtype of its input; empty for None."""
    dy, x = dy.contiguous(), x.contiguous()
    dx, dweight, dbias = torch.empty_like(x), buffer_of(weight, x), buffer_of(bias, x)
    rows, columns = count(x)
    if not x.numel():
        return dx, dweight.zero_(), dbias.zero_()
    high, block, warps = tile_of(rows, columns)
    shares, share = shares_of(rows, high, warps)
    factor = None if weight is None else weight.contiguous()
    dweights, dbiases = partials_of(shares, weight), partials_of(shares, bias)
    with on_device_of(x):
        backward_kernel[(shares,)](
            dy, x, factor, means, scales, dx, dweights, dbiases, rows, columns, share, high, block, num_warps=warps
        )
    add_shares(dweights, dweight, dbiases, dbias)
    return dx, dweight, dbias


@backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    means: torch.Tensor,
    scales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return buffer_of(x, x), buffer_of(weight, x), buffer_of(bias, x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    _, means, scales = output
    ctx.save_for_backward(x, weight, bias, means, scales)
    ctx.mark_non_differentiable(means, scales)


def _gradients(ctx: Any, dy: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    _, weight, bias, _, _ = ctx.saved_tensors
    dx, dweight, dbias = backward(dy, *ctx.saved_tensors)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None


forward.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def forward_kernel(x, weight, bias, y, means, scales, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1, keep_dims=True) / columns
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / columns + eps)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(scales + row, scale, mask=row < rows)
    normed = centred * scale
    if weight is not None:
        normed *= tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + at, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, x, weight, means, scales, dx, dweights, dbiases, rows, columns, share, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        factor = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * share, tl.minimum(program * share + share, rows), ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < columns)
        value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.load(dy + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normal = (value - mean) * scale  # not 0 beyond the columns, but dvalue is
        dweight += dvalue * normal
        dbias += dvalue
        weighted = dvalue
        if weight is not None:
            weighted *= factor
        slope = tl.sum(weighted * normal, 1, keep_dims=True) / columns
        shift = tl.sum(weighted, 1, keep_dims=True) / columns
        slopes = (weighted - normal * slope - shift) * scale
        tl.store(dx + row * columns + at, slopes.to(dx.dtype.element_ty), mask=inside)
    at = tl.arange(0, BLOCK)
    if dweights is not None:
        tl.store(dweights + program * columns + at, tl.sum(dweight, 0), mask=at < columns)
    if dbiases is not None:
        tl.store(dbiases + program * columns + at, tl.sum(dbias, 0), mask=at < columns)
