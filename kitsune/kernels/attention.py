"""Attention over sequences of up to 256 positions, forward and backward in one launch each.

The forward keeps the logarithm of each row's sum, from which the backward computes the scores again (Dao et al. 2022).
No mask of the dropout is stored: it is generated from a seed with Philox (Salmon et al. 2011), and again in the
backward. Nothing is added by atomics, so gradients are bitwise reproducible.
"""

import math
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels.attention_gradients import backward_kernel
from kitsune.kernels.attention_kernels import forward_kernel
from kitsune.kernels.dropout_add import SEEDS, scale_of
from kitsune.kernels.dtypes import wide_of
from kitsune.kernels.launch import IS_INTERPRETED, on_device_of, runs_in_triton
from kitsune.kernels.layouts import Shape

#: The longest sequence: flash attention is made for longer ones.
MOST_TOKENS: Final = 256
#: The sizes of a head that tiles of tensor cores hold without a rest.
HEADS: Final = (16, 32, 64, 128)
#: Triton's interpreter multiplies the bits of bf16 as integers.
HALF: Final = (torch.float16,) if IS_INTERPRETED else (torch.bfloat16, torch.float16)
#: Elements of a 16-byte load. Rows that do not start at multiples of it are copied first.
ALIGNED: Final = 8
#: The most elements from one position to the next: 32 bits then hold the offsets of the 256 rows of a tile.
LONGEST_STEP: Final = 2**23 - 1


class Tiles(NamedTuple):
    """How a kernel is launched: the queries and keys that a program multiplies at once, warps, and stages of loads.

    In the backward, programs for `keys` keys loop over the queries, and programs for `rows` queries loop over the keys,
    `columns` at once. Without `rows`, `keys` are all keys, and their program computes the gradient of the queries, too.
    `registers` of a thread are a limit for more programs on a multiprocessor; without it ptxas takes up to 255.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    rows: int = 0
    columns: int = 0
    registers: int | None = None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """softmax(`q` @ `k`.mT * `scale`) @ `v` for q, k and v (batch, heads, positions, head), in their dtype.

    `scale` is 1 / sqrt(head) by default. `causal` keeps scores on and below the diagonal. Elements of the softmax are
    dropped with probability `dropout_p`, and the others are divided by 1 - dropout_p. q, k and v may be views of one
    projection, and are read in place. The result is dense, with the order of heads and positions in memory that q has;
    each gradient has the order of its input.

    q, k and v may be bf16 or fp16, of one shape, with up to 256 positions and 16, 32, 64 or 128 elements of a head;
    scores and sums are in fp32. Falls back to F.scaled_dot_product_attention, which draws other random numbers, for
    other tensors, a scale that is not positive, and where Triton cannot run.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not is_offered(q, k, v, scale, dropout_p):
        return F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=scale)
    return forward(q, k, v, seed_for(dropout_p, q.device), scale, causal, dropout_p)[0]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Eager implementation, computed in fp32 (fp64 for fp64).

    `kept` (batch, heads, positions, positions) is True for each element to keep; drawn when not given.
    """
    wide = wide_of(q)
    scores = q.to(wide) @ k.to(wide).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    power = torch.softmax(scores, -1)
    if dropout_p:
        kept = torch.rand(power.shape, device=q.device) >= dropout_p if kept is None else kept
        power = torch.where(kept, power * scale_of(dropout_p), 0)
    return (power @ v.to(wide)).to(q.dtype)


def is_offered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, dropout_p: float) -> bool:
    """Whether the kernels support it."""
    return (
        q.ndim == 4
        and q.shape == k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
        and q.dtype in HALF
        and q.device == k.device == v.device
        and fits(*q.shape[2:])
        and q.numel() > 0
        and 0 < scale < math.inf
        and 0 <= dropout_p < 1
        and runs_in_triton(q)
    )


def fits(tokens: int, head: int) -> bool:
    """Whether the kernels support so many positions, and elements of a head."""
    return tokens <= MOST_TOKENS and head in HEADS


@torch.library.custom_op("kitsune::attention", mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the result, log2 of the sum of each row of e ** scores, in fp32), for arguments that `is_offered` accepts.

    `seed` is an int64 tensor of one element; without it nothing is dropped.
    """
    return launch_forward(q, k, v, seed, scale, causal, dropout_p)


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` without its operator."""
    q, k, v = (in_rows(one) for one in (q, k, v))
    batch, heads, tokens, head = q.shape
    out, sums = results_for(q)
    tiles = forward_tiles(tokens, head)
    with on_device_of(q):
        forward_kernel[(batch * heads * triton.cdiv(tokens, tiles.queries),)](
            q,
            k,
            v,
            seed,
            out,
            sums,
            *(one.stride()[:3] for one in (q, k, v, out)),
            heads,
            tokens,
            scale * math.log2(math.e),
            threshold_of(dropout_p),
            scale_of(dropout_p),
            causal,
            head,
            tiles.queries,
            rest_of(tokens, tiles.queries),
            tiles.keys,
            rest_of(tokens, tiles.keys),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )
    return out, sums


@forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return results_for(q)


@torch.library.custom_op("kitsune::attention_backward", mutates_args=())
def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    gradients = gradients_for(q, k, v)
    launch_backward(gradients, dout, q, k, v, out, sums, seed, scale, causal, dropout_p)
    return gradients


def launch_backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> None:
    """Writes the gradients of q, k and v, whose strides are those that `in_rows` accepts."""
    dout, q, k, v = (in_rows(one) for one in (dout, q, k, v))
    batch, heads, tokens, head = q.shape
    tiles = backward_tiles(tokens, head)
    programs = triton.cdiv(tokens, tiles.keys) + (triton.cdiv(tokens, tiles.rows) if tiles.rows else 0)
    with on_device_of(q):
        backward_kernel[(batch * heads * programs,)](
            q,
            k,
            v,
            seed,
            out,
            dout,
            sums,
            *gradients,
            *(one.stride()[:3] for one in (q, k, v, out, dout, *gradients)),
            heads,
            tokens,
            programs,
            scale,
            scale * math.log2(math.e),
            threshold_of(dropout_p),
            scale_of(dropout_p),
            causal,
            head,
            tiles.keys,
            rest_of(tokens, tiles.keys),
            tiles.queries,
            rest_of(tokens, tiles.queries),
            tiles.rows,
            rest_of(tokens, tiles.rows),
            tiles.columns,
            rest_of(tokens, tiles.columns),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )


@backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradients_for(q, k, v)


@register_flop_formula(torch.ops.kitsune.attention)
def _(q: Shape, *_: Any, **__: Any) -> int:
    return 4 * math.prod(q) * q[2]


@register_flop_formula(torch.ops.kitsune.attention_backward)
def _(dout: Shape, *_: Any, **__: Any) -> int:
    """Of five products, one of which computes the scores again."""
    return 10 * math.prod(dout) * dout[2]


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves what the backward needs of q, k and v, or of what holds all of them."""
    *projected, seed, ctx.scale, ctx.causal, ctx.dropout_p = inputs
    ctx.save_for_backward(*projected, *output, seed)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no tensor of zeros for the sums


def _gradients(ctx: Any, dout: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return (None,) * 7
    return *backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal, ctx.dropout_p), *[None] * 4


forward.register_autograd(_gradients, setup_context=keep)


def seed_for(dropout_p: float, device: torch.device) -> torch.Tensor | None:
    """A new seed; None where nothing is dropped."""
    return torch.randint(SEEDS, (1,), device=device) if dropout_p else None


def results_for(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the results of `forward`."""
    return buffer_for(in_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


def gradients_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers for the gradients."""
    dq, dk, dv = (buffer_for(in_rows(one)) for one in (q, k, v))
    return dq, dk, dv


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with each head's elements contiguous, and 16 bytes or a multiple between rows: itself if possible, or a copy.

    The strides of dimensions of size 1 do not matter.
    """
    steps = [step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    fits = x.stride(-1) == 1 and all(step % ALIGNED == 0 for step in steps) and x.stride(2) <= LONGEST_STEP
    return x if fits else x.contiguous()


def buffer_for(x: torch.Tensor) -> torch.Tensor:
    """A dense buffer with batch, heads and positions in the order in memory that `x` has."""
    order = sorted(range(3), key=x.stride, reverse=True)
    return torch.empty_permuted(x.shape, (*order, 3), dtype=x.dtype, device=x.device)


def threshold_of(p: float) -> int:
    """The int32 below which a random one is with probability `p`."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def rest_of(tokens: int, block: int) -> int:
    """The size of the block, a power of two, for the positions beyond whole blocks; 0 if there are none."""
    rest = tokens % block if block else 0
    return max(16, triton.next_power_of_2(rest)) if rest else 0


def forward_tiles(tokens: int, head: int) -> Tiles:
    """The tiles of the forward: the fastest of 14 on an H200 for 197 positions, and of two for 128.

    Others are chosen by the registers that ptxas assigns.
    """
    if head > 64 or tokens > 128:
        return Tiles(64, 64, 4, 2)
    return Tiles(64, 64, 4, 1 if tokens <= 64 else 2, registers=128)


def backward_tiles(tokens: int, head: int) -> Tiles:
    """The tiles of the backward: on an H200 the fastest of four for 128 positions, and for 197 as fast as four others.

    Others are chosen by the registers that ptxas assigns. With at most 128 registers a thread, two programs of eight
    warps share a multiprocessor, and one computes while the other waits.
    """
    if head > 64:
        return Tiles(32, 64, 4, 2, rows=64, columns=32)
    if tokens <= 64:
        return Tiles(32, 64, 4, 2, registers=168)
    if tokens <= 128:
        return Tiles(32, 128, 8, 2, registers=128)
    return Tiles(32, 128, 8, 2, rows=128, columns=64, registers=128)
