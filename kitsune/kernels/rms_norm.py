"""RMSNorm over the last dimension (Zhang, Sennrich 2019), forward and backward in one pass over each row.

The gradient of the weight is summed in two steps in a fixed order, without atomics, so it is bitwise reproducible.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import are_rows, count, on_device_of, runs_in_triton
from kitsune.kernels.rows import add_shares, buffer_of, partials_of, shares_of, tile_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` (..., n) divided by the root of its mean square along n, times `weight` (n,), in the dtype of `x`.

    fp32, bf16 and fp16 in any mix; sums are in fp32. Falls back to `reference` for rows of more than 65536 elements, a
    weight of another shape (which it broadcasts, or raises torch's error), and where Triton cannot run.
    """
    if not (are_rows(x, weight) and runs_in_triton(x, weight)):
        return reference(x, weight, eps)
    y, _ = forward(x, weight, eps)
    return y


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = x.to(wide_of(x))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


@torch.library.custom_op("kitsune::rms_norm", mutates_args=())
def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, 1 / rms of each row in fp32)."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, columns = count(x)
    y, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        high, block, warps = tile_of(rows, columns)
        grid = (triton.cdiv(rows, high),)
        with on_device_of(x):
            forward_kernel[grid](x, weight, y, scales, rows, columns, eps, high, block, num_warps=warps)
    return y, scales


@forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return buffer_of(x, x), x.new_empty(count(x)[0], dtype=torch.float32)


@torch.library.custom_op("kitsune::rms_norm_backward", mutates_args=())
def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x, gradient of weight), each in the dtype of its input."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    rows, columns = count(x)
    if not x.numel():
        return torch.empty_like(x), torch.zeros_like(weight)
    high, block, warps = tile_of(rows, columns)
    shares, share = shares_of(rows, high, warps)
    dx, dweight, dweights = buffer_of(x, x), buffer_of(weight, x), partials_of(shares, weight)
    with on_device_of(x):
        backward_kernel[(shares,)](
            dy, x, weight, scales, dx, dweights, rows, columns, share, high, block, num_warps=warps
        )
    add_shares(dweights, dweight)
    return dx, dweight


@backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return buffer_of(x, x), buffer_of(weight, x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors), None


forward.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def forward_kernel(x, weight, y, scales, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / columns + eps)
    tl.store(scales + row, scale, mask=row < rows)
    factor = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + at, (value * scale * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy, x, weight, scales, dx, dweights, rows, columns, share, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * share, tl.minimum(program * share + share, rows), ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < columns)
        value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.load(dy + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normal = value * scale
        dweight += dvalue * normal
        weighted = dvalue * factor
        slope = tl.sum(weighted * normal, 1, keep_dims=True) / columns
        tl.store(dx + row * columns + at, ((weighted - normal * slope) * scale).to(dx.dtype.element_ty), mask=inside)
    at = tl.arange(0, BLOCK)
    tl.store(dweights + program * columns + at, tl.sum(dweight, 0), mask=at < columns)
