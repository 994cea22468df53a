"""Rotary position embedding (Su et al. 2021): rotates pairs of a head's elements by the angle of their position.

The inverse of a rotation is the opposite one: the backward pass is the same operator, and saves the angles only.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import MOST_IN_A_BLOCK, on_device_of, runs_in_triton, warps_of
from kitsune.kernels.tiles import fitting

#: Pairs of a tile: with the threads of `warps_of`, two 16-byte loads of bf16 each.
PAIRS: Final = 1024

#: The most heads that share one load of their angles.
HEADS: Final = 16


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """`x` (batch, heads, sequence, head) rotated by `cos` and `sin`, in the dtype of `x`, computed in fp32.

    `cos` and `sin` are (sequence, head / 2) or (batch, sequence, head / 2), where batch may be 1. They may also be as
    wide as the head, with two equal halves as in Hugging Face: the first half is used. The pairs are elements i and
    i + head / 2, as in GPT-NeoX and Llama, or with `interleaved` 2 i and 2 i + 1, as in GPT-J. The order of heads and
    positions in memory is that of `x`.

    Falls back to `reference` where Triton cannot run, for angles that require a gradient, other shapes, and heads of
    more than 65536 elements.
    """
    if cos.requires_grad or sin.requires_grad or not fits(x, cos, sin) or not runs_in_triton(x, cos, sin):
        return reference(x, cos, sin, interleaved)
    return turned(x, cos, sin, interleaved, False)


def fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel supports these shapes."""
    if x.dim() != 4 or x.shape[-1] % 2 or x.shape[-1] > MOST_IN_A_BLOCK or cos.shape != sin.shape:
        return False
    batch, _, tokens, head = x.shape
    return cos.shape[-2:] in ((tokens, head // 2), (tokens, head)) and cos.shape[:-2] in ((), (1,), (batch,))


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64)."""
    wide = x.to(wide_of(x))
    cos, sin = (angle[..., : x.shape[-1] // 2].to(wide.dtype).unsqueeze(-3) for angle in (cos, sin))
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    pairs = first * cos - second * sin, second * cos + first * sin
    return (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)


@torch.library.custom_op("kitsune::rope", mutates_args=())
def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    """`x` rotated by the angles, or with `back` by their opposites."""
    x = in_heads(x)
    y = buffer_for(x)
    if x.numel():
        batch, heads, tokens, head = x.shape
        cos, sin = (angles_for(x, angle) for angle in (cos, sin))
        wide = triton.next_power_of_2(head // 2)
        high = fitting(heads, most=min(HEADS, max(1, PAIRS // wide)))
        long = min(triton.next_power_of_2(tokens), max(1, PAIRS // wide // high))
        programs = batch * triton.cdiv(tokens, long) * triton.cdiv(heads, high)
        steps = (step for tensor in (x, y) for step in tensor.stride()[:3])
        with on_device_of(x):
            kernel[(programs,)](
                x,
                cos,
                sin,
                y,
                *steps,
                *cos.stride()[:2],
                *sin.stride()[:2],
                heads,
                tokens,
                -1.0 if back else 1.0,
                interleaved,
                head // 2,
                wide,
                high,
                long,
                num_warps=warps_of(wide * high * long),
            )
    return y


@turned.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    return buffer_for(in_heads(x))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return turned(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.back), None, None, None, None


turned.register_autograd(_gradients, setup_context=_keep)


def in_heads(x: torch.Tensor) -> torch.Tensor:
    """`x` with its last dimension contiguous: itself if possible, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def buffer_for(x: torch.Tensor) -> torch.Tensor:
    """A dense buffer for the result, with heads and positions in the order in memory that `x` has."""
    order = (0, 2, 1, 3) if x.stride(1) < x.stride(2) else (0, 1, 2, 3)
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


def angles_for(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`angles` as (batch, sequence, head / 2), the last dimension contiguous, without a copy if possible."""
    batch, _, tokens, head = x.shape
    half = angles[..., : head // 2]
    return (half if half.stride(-1) == 1 else half.contiguous()).expand(batch, tokens, head // 2)


@triton.jit
def kernel(
    x,
    cos,
    sin,
    y,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    heads,
    tokens,
    sign,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HIGH: tl.constexpr,
    LONG: tl.constexpr,
):
    """A tile of LONG positions, HIGH heads and WIDE pairs, of which HALF exist."""
    across, along = tl.cdiv(heads, HIGH), tl.cdiv(tokens, LONG)
    program = tl.program_id(0)
    batch = (program // (across * along)).to(tl.int64)
    token = (program // across % along).to(tl.int64) * LONG + tl.arange(0, LONG)[:, None, None]
    head = (program % across).to(tl.int64) * HIGH + tl.arange(0, HIGH)[None, :, None]
    pair = tl.arange(0, WIDE)[None, None, :]
    there = (token < tokens) & (pair < HALF)
    cosine = tl.load(cos + batch * cos_batch + token * cos_token + pair, mask=there, other=0.0).to(tl.float32)
    sine = sign * tl.load(sin + batch * sin_batch + token * sin_token + pair, mask=there, other=0.0).to(tl.float32)
    x += batch * x_batch + token * x_token + head * x_head
    y += batch * y_batch + token * y_token + head * y_head
    if INTERLEAVED:
        at = tl.arange(0, 2 * WIDE)[None, None, :]
        inside = (token < tokens) & (head < heads) & (at < 2 * HALF)
        pairs = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, (LONG, HIGH, WIDE, 2)))
        pairs = tl.join(first * cosine - second * sine, second * cosine + first * sine)
        tl.store(y + at, tl.reshape(pairs, (LONG, HIGH, 2 * WIDE)).to(y.dtype.element_ty), mask=inside)
    else:
        inside = there & (head < heads)
        first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + pair, (first * cosine - second * sine).to(y.dtype.element_ty), mask=inside)
        tl.store(y + HALF + pair, (second * cosine + first * sine).to(y.dtype.element_ty), mask=inside)
