"""Attention over queries, keys and values that one projection has computed, whose gradient is written as one tensor.

To join three gradients takes 26 us for each layer of a ViT-B/16 with 64 images on an H200
(results/budget/2026-11-29-h200-2.jsonl).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from kitsune.kernels.attention import is_offered, keep, launch_backward, launch_forward, results_for, seed_for
from kitsune.kernels.layouts import Shape


def packed_attention(
    qkv: torch.Tensor, scale: float | None = None, causal: bool = False, dropout_p: float = 0.0
) -> torch.Tensor:
    """`attention` of q, k and v in `qkv` (batch, positions, 3, heads, head); (batch, heads, positions, head).

    Falls back to F.scaled_dot_product_attention as `attention` does.
    """
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    parts = parts_of(qkv)
    if not is_offered(*parts, scale, dropout_p):
        return F.scaled_dot_product_attention(*parts, None, dropout_p, causal, scale=scale)
    return forward(qkv.contiguous(), seed_for(dropout_p, qkv.device), scale, causal, dropout_p)[0]


def parts_of(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v), each (batch, heads, positions, head), of a tensor (batch, positions, 3, heads, head)."""
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return q, k, v


@torch.library.custom_op("kitsune::packed_attention", mutates_args=())
def forward(
    qkv: torch.Tensor, seed: torch.Tensor | None, scale: float, causal: bool, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kitsune::attention`, of a contiguous tensor."""
    return launch_forward(*parts_of(qkv), seed, scale, causal, dropout_p)


@forward.register_fake
def _(
    qkv: torch.Tensor, seed: torch.Tensor | None, scale: float, causal: bool, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, *_ = parts_of(qkv)
    return results_for(q)


@torch.library.custom_op("kitsune::packed_attention_backward", mutates_args=())
def backward(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> torch.Tensor:
    """The gradient of `qkv`."""
    gradient = torch.empty_like(qkv)
    launch_backward(parts_of(gradient), dout, *parts_of(qkv), out, sums, seed, scale, causal, dropout_p)
    return gradient


@backward.register_fake
def _(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> torch.Tensor:
    return torch.empty_like(qkv)


@register_flop_formula(torch.ops.kitsune.packed_attention)
def _(qkv: Shape, *_: Any, **__: Any) -> int:
    return 4 * qkv[1] * math.prod(qkv) // 3


@register_flop_formula(torch.ops.kitsune.packed_attention_backward)
def _(_: Shape, qkv: Shape, *__: Any, **___: Any) -> int:
    return 10 * qkv[1] * math.prod(qkv) // 3


def _gradients(ctx: Any, dout: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return (None,) * 5
    return backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal, ctx.dropout_p), *[None] * 4


forward.register_autograd(_gradients, setup_context=keep)
