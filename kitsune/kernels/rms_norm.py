"""RMSNorm over the last dimension (Zhang, Sennrich 2019), forward and backward in one pass over each row.

The gradient of the weight is summed in two steps in a fixed order, without atomics: the same bits every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch import MOST_IN_A_BLOCK, block_of, is_reached, on_device_of, warps_of

#: Programs that share the rows of a backward pass; each leaves one partial gradient of the weight.
SHARES = 264  # two for each of an H200's multiprocessors


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` (..., n) over the root of its mean square along n, times `weight` (n,), in the dtype of `x`.

    Sums are in fp32. What Triton does not reach goes through `reference`.
    """
    if x.shape[-1] > MOST_IN_A_BLOCK or not is_reached(x, weight):
        return reference(x, weight, eps)
    y, _ = forward(x, weight, eps)
    return y


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in eager torch, computed in fp32 (fp64 for fp64)."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


@torch.library.custom_op("kitsune::rms_norm", mutates_args=())
def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, 1 / rms of each row in fp32)."""
    x = x.contiguous()
    rows, columns = count(x)
    y, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        block = block_of(columns)
        with on_device_of(x):
            forward_kernel[(rows,)](x, weight.contiguous(), y, scales, columns, eps, block, num_warps=warps_of(block))
    return y, scales


@forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(count(x)[0], dtype=torch.float32)


@torch.library.custom_op("kitsune::rms_norm_backward", mutates_args=())
def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x, gradient of weight), each in the dtype of what it belongs to."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    rows, columns = count(x)
    if not x.numel():
        return torch.empty_like(x), torch.zeros_like(weight)
    shares, block = min(rows, SHARES), block_of(columns)
    dx, partial = torch.empty_like(x), torch.empty(shares, columns, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        backward_kernel[(shares,)](
            dy,
            x,
            weight,
            scales,
            dx,
            partial,
            rows,
            columns,
            triton.cdiv(rows, shares),
            block,
            num_warps=warps_of(block),
        )
    return dx, partial.sum(0).to(weight.dtype)


@backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *backward(dy, *ctx.saved_tensors), None


forward.register_autograd(_gradients, setup_context=_keep)


def count(x: torch.Tensor) -> tuple[int, int]:
    """(rows, elements of a row)."""
    columns = x.shape[-1]
    return (x.numel() // columns if columns else 0), columns


@triton.jit
def forward_kernel(x, weight, y, scales, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / columns + eps)
    tl.store(scales + row, scale)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + at, (value * scale * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy, x, weight, scales, dx, partial, rows, columns, share, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program * share, tl.minimum(program * share + share, rows)):
        value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        dvalue = tl.load(dy + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        normal = value * scale
        dweight += dvalue * normal
        weighted = dvalue * factor
        slope = tl.sum(weighted * normal) / columns
        tl.store(dx + row * columns + at, ((weighted - normal * slope) * scale).to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * columns + at, dweight, mask=inside)
