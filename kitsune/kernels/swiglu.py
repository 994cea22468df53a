"""SwiGLU's product silu(gate) * up (Shazeer 2020) in one pass, and both gradients in another.

The backward pass recomputes silu and its slope from the gate, so only the inputs are saved.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import on_device_of, runs_in_triton, warps_of
from kitsune.kernels.tiles import tile_of


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(`gate`) * `up`, both (..., n), in the dtype of `gate`, computed in fp32.

    Rows may have gaps between them, as the halves of one projection have; they are not copied. Falls back to
    `reference` where Triton cannot run, and for shapes to be broadcast.
    """
    if gate.shape != up.shape or not runs_in_triton(gate, up):
        return reference(gate, up)
    return forward(gate, up)


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = wide_of(gate)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


@torch.library.custom_op("kitsune::swiglu", mutates_args=())
def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The product, contiguous."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if y.numel():
        gate, up = in_rows(gate), in_rows(up)
        rows, columns = gate.shape
        high, wide = tile_of(rows, columns)
        programs = triton.cdiv(rows, high) * triton.cdiv(columns, wide)
        with on_device_of(gate):
            forward_kernel[(programs,)](
                gate, up, y, gate.stride(0), up.stride(0), rows, columns, high, wide, num_warps=warps_of(high * wide)
            )
    return y


@forward.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op("kitsune::swiglu_backward", mutates_args=())
def backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of gate, gradient of up), each in the dtype of its input."""
    dgate, dup = (torch.empty_like(like, memory_format=torch.contiguous_format) for like in (gate, up))
    if dgate.numel():
        dy, gate, up = in_rows(dy), in_rows(gate), in_rows(up)
        rows, columns = gate.shape
        high, wide = tile_of(rows, columns)
        programs = triton.cdiv(rows, high) * triton.cdiv(columns, wide)
        steps = dy.stride(0), gate.stride(0), up.stride(0)
        with on_device_of(gate):
            backward_kernel[(programs,)](
                dy, gate, up, dgate, dup, *steps, rows, columns, high, wide, num_warps=warps_of(high * wide)
            )
    return dgate, dup


@backward.register_fake
def _(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(gate, memory_format=torch.contiguous_format),
        torch.empty_like(up, memory_format=torch.contiguous_format),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return backward(dy, *ctx.saved_tensors)


forward.register_autograd(_gradients, setup_context=_keep)


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as (rows, n) with n contiguous: a view if the rows have one stride, else a copy."""
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])


@triton.jit
def forward_kernel(gate, up, y, gate_step, up_step, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(gate + row * gate_step + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_step + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, (value * tl.sigmoid(value) * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy, gate, up, dgate, dup, dy_step, gate_step, up_step, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    dvalue = tl.load(dy + row * dy_step + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + row * gate_step + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_step + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(value)
    slope = share * (1.0 + value * (1.0 - share))
    at = row * columns + column
    tl.store(dgate + at, (dvalue * factor * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (dvalue * value * share).to(dup.dtype.element_ty), mask=inside)
