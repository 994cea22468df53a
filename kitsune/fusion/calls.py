"""The functions that replace matches: Kitsune's kernels with the casts and reshapes around them.

`dtype` is that of the result in the model: under autocast torch casts its inputs, and so do these functions.
"""

import torch
import torch.nn.functional as F

from kitsune.kernels import add_norm as add_norms
from kitsune.kernels import attention as attentions
from kitsune.kernels import bias_activation, dropout_add, gated_linear, linear_cross_entropy, softmax
from kitsune.kernels import layer_norm as layer_norms
from kitsune.kernels import linear_activation as mlps
from kitsune.kernels import packed_attention as packed_attentions
from kitsune.kernels import pointwise_convolution as pointwise_convolutions
from kitsune.kernels import rms_norm as rms_norms
from kitsune.kernels import rope as ropes
from kitsune.kernels import stem_convolution as stem_convolutions
from kitsune.kernels.layouts import is_channels_last


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    return layer_norms.layer_norm(x.to(dtype), weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    return rms_norms.rms_norm(x.to(dtype), weight, eps)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norms.add_layer_norm(x.to(dtype), residual, weight, bias, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norms.add_rms_norm(x.to(dtype), residual, weight, eps)


def mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    kind: str,
    dtype: torch.dtype,
    is_transposed: bool = False,
) -> torch.Tensor:
    b1, b2 = (None if bias is None else bias.to(dtype) for bias in (b1, b2))
    w1, w2 = (weight.to(dtype).t() if is_transposed else weight.to(dtype) for weight in (w1, w2))
    return mlps.mlp(x.to(dtype), w1, b1, w2, b2, kind)


def gated_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, kind: str, dtype: torch.dtype
) -> torch.Tensor:
    return gated_linear.gated_mlp(x.to(dtype), gate.to(dtype), up.to(dtype), down.to(dtype), kind)


def joined_gated_mlp(
    x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor, kind: str, dtype: torch.dtype
) -> torch.Tensor:
    return gated_linear.joined_gated_mlp(x.to(dtype), gate_and_up.to(dtype), down.to(dtype), kind)


def linear_activation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: str, dtype: torch.dtype
) -> torch.Tensor:
    """The bias is added in the activation kernel, so the product is written once and read once."""
    return bias_activation.bias_activation(F.linear(x, weight), bias, kind).to(dtype)


def added_dropout(x: torch.Tensor, residual: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    return dropout_add.dropout_add(x.to(dtype), residual, p)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """`heads`: the dimension of heads in `x`, where the angles have size 1. Both halves of the angles are equal."""
    cos, sin = (angle[(None,) * (x.ndim - angle.ndim)].squeeze(heads) for angle in (cos, sin))
    return ropes.rope(x.to(dtype).movedim(heads, 1), cos, sin).movedim(1, heads)


def masked_softmax(
    x: torch.Tensor, mask: torch.Tensor | None, drops: bool, scale: float, causal: bool, dtype: torch.dtype
) -> torch.Tensor:
    """`drops`: the mask is True for elements to drop; the kernel's mask is True for elements to keep."""
    if mask is not None and drops:
        mask = mask.logical_not()
    return softmax.softmax(x.to(dtype), mask, scale, causal)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    dropout_p: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    return attentions.attention(q.to(dtype), k.to(dtype), v.to(dtype), scale, causal, dropout_p)


def packed_attention(
    packed: torch.Tensor,
    shape: tuple[int, int, int, int],
    scale: float | None,
    causal: bool,
    dropout_p: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`shape`: that of q, k and v, (batch, heads, positions, head), all of which `packed` holds."""
    batch, heads, tokens, head = shape
    qkv = packed.to(dtype).view(batch, tokens, 3, heads, head)
    return packed_attentions.packed_attention(qkv, scale, causal, dropout_p)


def projected_attention(
    x: torch.Tensor,
    wq: torch.Tensor,
    wk: torch.Tensor,
    wv: torch.Tensor,
    bq: torch.Tensor | None,
    bk: torch.Tensor | None,
    bv: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    scale: float | None,
    causal: bool,
    dropout_p: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One product gives queries, keys and values, and one each the gradients of the input and of the weights."""
    weight = torch.cat([one.to(dtype) for one in (wq, wk, wv)])
    biases = [bias.to(dtype) for bias in (bq, bk, bv) if bias is not None]
    packed = F.linear(x.to(dtype), weight, torch.cat(biases) if biases else None)
    return packed_attention(packed, shape, scale, causal, dropout_p, dtype)


def multi_head_attention(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    heads: int,
    causal: bool,
    dropout_p: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`x` [positions, batch, width]; so is the result, a view of [batch, positions, width]."""
    tokens, batch, width = x.shape
    bias, out_bias = (None if one is None else one.to(dtype) for one in (bias, out_bias))
    packed = F.linear(x.transpose(0, 1).to(dtype), weight.to(dtype), bias)
    shape = (batch, heads, tokens, width // heads)
    y = packed_attention(packed, shape, None, causal, dropout_p, dtype).transpose(1, 2).flatten(2)
    return F.linear(y, out_weight.to(dtype), out_bias).transpose(0, 1)


def patch_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution of patches that do not overlap, as one matrix product.

    `x` [n, channels, h, w], `weight` [out, channels, height, width]; h and w are multiples of height and width. The
    result is laid out as that of the convolution: channels last where `x` or `weight` is.
    """
    high, wide = weight.shape[2:]
    patches = x.unflatten(3, (-1, wide)).unflatten(2, (-1, high))  # [n, channels, rows, height, columns, width]
    patches = patches.permute(0, 2, 4, 1, 3, 5)
    product = F.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)
    return product if is_channels_last(x) or is_channels_last(weight) else product.contiguous()


def stem_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The compiler adds the bias with what follows."""
    y = stem_convolutions.stem_convolution(x.to(dtype), weight.to(dtype), stride, padding)
    return y if bias is None else y + bias.to(dtype)[:, None, None]


def pointwise_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """With the batch norm after it, in training: `gain` and `bias` (out,) are its own, in fp32 as its statistics.

    It moves the running statistics as torch does. The compiler normalises together with what follows.
    """
    y, mean, variance = pointwise_convolutions.pointwise_convolution(x.to(dtype), weight.to(dtype))
    count = y.numel() // y.shape[1]
    for running, value in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
        running.copy_((1 - momentum) * running + momentum * value.detach())
    result: torch.Tensor = pointwise_convolutions.Normalised.apply(y, mean, variance, gain, bias, eps)
    return result


def head_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return linear_cross_entropy.linear_cross_entropy(
        rows, weight, target, bias, ignore_index, label_smoothing, reduction
    )
