"""The sum of a branch and its residual, and the LayerNorm or RMSNorm of that sum over the last dimension, in one pass.

The forward writes both, the backward takes the gradients of both. The norm is of the rounded sum, so the results are
those of the addition followed by the norm. See layer_norm.py and rms_norm.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kitsune.kernels import layer_norm, rms_norm
from kitsune.kernels.launch import are_rows, count, on_device_of, runs_in_triton
from kitsune.kernels.rows import add_shares, buffer_of, partials_of, shares_of, tile_of


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The LayerNorm of the sum, and the sum, of `x` and `residual` (..., n), both in the dtype of `x`.

    `weight` and `bias` are (n,) or None. fp32, bf16 and fp16 in any mix; sums are in fp32. Falls back to `reference`
    for rows of more than 65536 elements, `x` and `residual` of different shapes, weights of another shape, and where
    Triton cannot run.
    """
    if not is_offered(x, residual, weight, bias):
        return reference(x, residual, weight, bias, eps)
    normed, total, _, _ = forward(x, residual, weight, bias, eps, True)
    return normed, total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMSNorm of the sum, and the sum, of `x` and `residual` (..., n), both in the dtype of `x`; `weight` is (n,).

    fp32, bf16 and fp16 in any mix; sums are in fp32. Falls back to `rms_reference` for rows of more than 65536
    elements, `x` and `residual` of different shapes, a weight of another shape, and where Triton cannot run.
    """
    if not is_offered(x, residual, weight):
        return rms_reference(x, residual, weight, eps)
    normed, total, _, _ = forward(x, residual, weight, None, eps, False)
    return normed, total


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_layer_norm` in eager torch, computed in fp32 (fp64 for fp64)."""
    total = (x + residual).to(x.dtype)
    return layer_norm.reference(total, weight, bias, eps), total


def rms_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in eager torch, computed in fp32 (fp64 for fp64)."""
    total = (x + residual).to(x.dtype)
    return rms_norm.reference(total, weight, eps), total


def is_offered(x: torch.Tensor, residual: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Whether the kernels support it."""
    return x.shape == residual.shape and are_rows(x, *weights) and runs_in_triton(x, residual, *weights)


@torch.library.custom_op("kitsune::add_norm", mutates_args=())
def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(norm, sum, mean of each row, 1 / root of each row's mean square), the last two in fp32.

    `is_centred`: True for a LayerNorm; an RMSNorm has no means.
    """
    x, residual = x.contiguous(), residual.contiguous()
    weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))
    normed, total, means, scales = buffers_of(x, is_centred)
    rows, columns = count(x)
    if x.numel():
        high, block, warps = tile_of(rows, columns)
        grid = (triton.cdiv(rows, high),)
        with on_device_of(x):
            forward_kernel[grid](
                x,
                residual,
                weight,
                bias,
                normed,
                total,
                means if is_centred else None,
                scales,
                rows,
                columns,
                eps,
                high,
                block,
                num_warps=warps,
            )
    return normed, total, means, scales


@forward.register_fake
def _(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return buffers_of(x, is_centred)


@torch.library.custom_op("kitsune::add_norm_backward", mutates_args=())
def backward(
    dnormed: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    means: torch.Tensor,
    scales: torch.Tensor,
    is_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of both summands, of weight, of bias). The first is in the dtype of the sum; None gives empty ones."""
    dnormed, factor = dnormed.contiguous(), None if weight is None else weight.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx, dweight, dbias = buffer_of(total, total), buffer_of(weight, total), buffer_of(bias, total)
    rows, columns = count(total)
    if not total.numel():
        return dx, dweight.zero_(), dbias.zero_()
    high, block, warps = tile_of(rows, columns)
    shares, share = shares_of(rows, high, warps)
    dweights, dbiases = partials_of(shares, weight), partials_of(shares, bias)
    with on_device_of(total):
        backward_kernel[(shares,)](
            dnormed,
            dtotal,
            total,
            factor,
            means if is_centred else None,
            scales,
            dx,
            dweights,
            dbiases,
            rows,
            columns,
            share,
            high,
            block,
            num_warps=warps,
        )
    add_shares(dweights, dweight, dbiases, dbias)
    return dx, dweight, dbias


@backward.register_fake
def _(
    dnormed: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    means: torch.Tensor,
    scales: torch.Tensor,
    is_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return buffer_of(total, total), buffer_of(weight, total), buffer_of(bias, total)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, residual, weight, bias, _, is_centred = inputs
    _, total, means, scales = output
    ctx.save_for_backward(total, weight, bias, means, scales)
    ctx.is_centred, ctx.residual_dtype = is_centred, residual.dtype
    ctx.mark_non_differentiable(means, scales)
    ctx.set_materialize_grads(False)  # the sum of a model's last norm is unused: this avoids a tensor of zeros


def _gradients(
    ctx: Any, dnormed: torch.Tensor | None, dtotal: torch.Tensor | None, *_: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    dx, dweight, dbias = dtotal, None, None
    if dnormed is not None:
        dx, dweight, dbias = backward(dnormed, dtotal, *ctx.saved_tensors, ctx.is_centred)
    _, weight, bias, _, _ = ctx.saved_tensors
    dresidual = None if dx is None else dx.to(ctx.residual_dtype)
    return dx, dresidual, None if weight is None else dweight, None if bias is None else dbias, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def buffers_of(x: torch.Tensor, is_centred: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers for the results of `forward`."""
    rows, _ = count(x)
    means, scales = (x.new_empty(length, dtype=torch.float32) for length in (rows if is_centred else 0, rows))
    return buffer_of(x, x), buffer_of(x, x), means, scales


@triton.jit
def forward_kernel(
    x, residual, weight, bias, normed, total, means, scales, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    branch = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(residual + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    rounded = (branch + stream).to(total.dtype.element_ty)
    tl.store(total + row * columns + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    if means is not None:
        mean = tl.sum(value, 1, keep_dims=True) / columns
        tl.store(means + row, mean, mask=row < rows)
        value = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / columns + eps)
    tl.store(scales + row, scale, mask=row < rows)
    result = value * scale
    if weight is not None:
        result *= tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(normed + row * columns + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dnormed,
    dtotal,
    total,
    weight,
    means,
    scales,
    dx,
    dweights,
    dbiases,
    rows,
    columns,
    share,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
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
        normal = tl.load(total + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        weighted = tl.load(dnormed + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        if means is not None:
            normal -= tl.load(means + row, mask=row < rows, other=0.0)
        normal *= scale
        dweight += weighted * normal
        dbias += weighted
        if weight is not None:
            weighted *= factor
        slopes = weighted - normal * (tl.sum(weighted * normal, 1, keep_dims=True) / columns)
        if means is not None:
            slopes -= tl.sum(weighted, 1, keep_dims=True) / columns
        slopes *= scale
        if dtotal is not None:
            slopes += tl.load(dtotal + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + at, slopes.to(dx.dtype.element_ty), mask=inside)
    at = tl.arange(0, BLOCK)
    if dweights is not None:
        tl.store(dweights + program * columns + at, tl.sum(dweight, 0), mask=at < columns)
    if dbiases is not None:
        tl.store(dbiases + program * columns + at, tl.sum(dbias, 0), mask=at < columns)
