"""The cases of suite kernels: what users write in torch, our kernel of it, and the sizes in which models ask for it.

Sizes go in; an operation comes out, with its inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_runs import DTYPES, Casts, Function, Operation, Place, Sizes, Update
from benchmarks.kernel_shapes import (
    BLOCKS,
    BOTTLENECKS,
    CAUSAL,
    CLASSES,
    DROPPED,
    GATED,
    GATED_BLOCKS,
    HEADS,
    HIDDEN,
    HIDDEN_CLASSES,
    INNER,
    MASKED,
    MODELS,
    PATCHES,
    POOLS,
    PROJECTED,
    STAGES,
    STEMS,
)
from kitsune.fusion import calls
from kitsune.kernels.add_norm import add_layer_norm, add_rms_norm
from kitsune.kernels.batch_norm_relu import batch_norm_relu
from kitsune.kernels.bias_activation import KINDS, bias_activation
from kitsune.kernels.cross_entropy import cross_entropy
from kitsune.kernels.dropout_add import dropout_add
from kitsune.kernels.gated_linear import gated_mlp
from kitsune.kernels.layer_norm import layer_norm
from kitsune.kernels.linear_activation import mlp
from kitsune.kernels.linear_cross_entropy import linear_cross_entropy
from kitsune.kernels.max_pool import max_pool
from kitsune.kernels.packed_attention import packed_attention
from kitsune.kernels.rms_norm import rms_norm
from kitsune.kernels.rope import rope
from kitsune.kernels.softmax import softmax
from kitsune.kernels.stem_convolution import stem_convolution
from kitsune.kernels.swiglu import swiglu
from tuner.zoo import ZOO

EPS = 1e-5
MOMENTUM = 0.1
IMAGE = 3  # channels
SCALE = 0.125  # one over the root of a head's 64 elements

# What is computed -----------------------------------------------------------------------------------------------------


def of_layer_norm(sizes: Sizes, place: Place) -> Operation:
    width = sizes[-1:]
    return Operation(
        lambda x, weight, bias: F.layer_norm(x, width, weight, bias, EPS),
        lambda x, weight, bias: layer_norm(x, weight, bias, EPS),
        (place.draw(*sizes), place.draw(*width), place.draw(*width)),
    )


def of_rms_norm(sizes: Sizes, place: Place) -> Operation:
    width = sizes[-1:]
    return Operation(
        lambda x, weight: F.rms_norm(x, width, weight, EPS),
        lambda x, weight: rms_norm(x, weight, EPS),
        (place.draw(*sizes), place.draw(*width)),
    )


def of_add_layer_norm(sizes: Sizes, place: Place) -> Operation:
    width = sizes[-1:]

    def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        total = x + residual
        return F.layer_norm(total, width, weight, bias, EPS), total

    inputs = place.draw(*sizes), place.draw(*sizes), place.draw(*width), place.draw(*width)
    return Operation(eager, lambda *given: add_layer_norm(*given, EPS), inputs)


def of_add_rms_norm(sizes: Sizes, place: Place) -> Operation:
    width = sizes[-1:]

    def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return F.rms_norm(total, width, weight, EPS), total

    inputs = place.draw(*sizes), place.draw(*sizes), place.draw(*width)
    return Operation(eager, lambda *given: add_rms_norm(*given, EPS), inputs)


def of_softmax_causal(sizes: Sizes, place: Place) -> Operation:
    """Of attention scores. Eager adds a mask of -inf that is there: filling in would cost its backward a pass more."""
    batch, heads, tokens = sizes
    mask = torch.full((tokens, tokens), -torch.inf, device=place.device).triu(1).to(place.dtype)
    return Operation(
        lambda x, mask: torch.softmax(x * SCALE + mask, -1),
        lambda x, _: softmax(x, scale=SCALE, causal=True),
        (place.draw(batch, heads, tokens, tokens), mask),
    )


def of_softmax_masked(sizes: Sizes, place: Place) -> Operation:
    """The same for sequences that are padded at their end, by up to a half."""
    batch, heads, tokens = sizes
    lengths = torch.linspace(tokens, tokens / 2, batch, device=place.device).long()
    is_padding = torch.arange(tokens, device=place.device) >= lengths[:, None]
    mask = torch.zeros(batch, tokens, device=place.device).masked_fill(is_padding, -torch.inf)
    return Operation(
        lambda x, mask: torch.softmax(x * SCALE + mask, -1),
        lambda x, mask: softmax(x, mask, SCALE),
        (place.draw(batch, heads, tokens, tokens), mask.to(place.dtype)[:, None, None, :]),
    )


def of_bias_activation(sizes: Sizes, place: Place, kind: str) -> Operation:
    return Operation(
        lambda x, bias: KINDS[kind](x + bias),
        lambda x, bias: bias_activation(x, bias, kind),
        (place.draw(*sizes), place.draw(sizes[-1])),
    )


def of_mlp(sizes: Sizes, place: Place, kind: str) -> Operation:
    """`sizes`: (rows, hidden, width within the block)."""
    rows, hidden, width = sizes
    w1, w2 = (
        (place.draw(out, inner).detach() / inner**0.5).requires_grad_()
        for out, inner in ((width, hidden), (hidden, width))
    )

    def eager(*inputs: torch.Tensor) -> torch.Tensor:
        x, w1, b1, w2, b2 = inputs
        return F.linear(KINDS[kind](F.linear(x, w1, b1)), w2, b2)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        x, w1, b1, w2, b2 = inputs
        return mlp(x, w1, b1, w2, b2, kind)

    inputs = place.draw(rows, hidden), w1, place.draw(width), w2, place.draw(hidden)
    return Operation(eager, compiled(ours, place), inputs)


def of_gated_mlp(sizes: Sizes, place: Place, kind: str) -> Operation:
    """`sizes`: (rows, hidden, width within the block)."""
    rows, hidden, width = sizes
    weights = (
        (place.draw(out, inner).detach() / inner**0.5).requires_grad_()
        for out, inner in ((width, hidden), (width, hidden), (hidden, width))
    )

    def eager(*inputs: torch.Tensor) -> torch.Tensor:
        x, gate, up, down = inputs
        return F.linear(KINDS[kind](F.linear(x, gate)) * F.linear(x, up), down)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        x, gate, up, down = inputs
        return gated_mlp(x, gate, up, down, kind)

    return Operation(eager, compiled(ours, place), (place.draw(rows, hidden), *weights))


def of_swiglu(sizes: Sizes, place: Place) -> Operation:
    return Operation(lambda gate, up: F.silu(gate) * up, swiglu, (place.draw(*sizes), place.draw(*sizes)))


def of_dropout_add(sizes: Sizes, place: Place) -> Operation:
    """Without the bias, which the product before it adds."""
    return Operation(
        lambda x, residual: F.dropout(x, DROPPED) + residual,
        lambda x, residual: dropout_add(x, residual, DROPPED),
        (place.draw(*sizes), place.draw(*sizes)),
    )


def of_rope(sizes: Sizes, place: Place) -> Operation:
    """As Hugging Face writes it, on heads that lie within each position."""
    batch, heads, tokens, head = sizes
    speeds = 10000.0 ** (-torch.arange(0, head, 2, device=place.device) / head)
    angles = torch.outer(torch.arange(tokens, device=place.device), speeds).repeat(1, 2)
    x = place.draw(batch, tokens, heads, head).detach().transpose(1, 2).requires_grad_()

    def eager(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return Operation(eager, rope, (x, angles.cos().to(place.dtype), angles.sin().to(place.dtype)))


def of_attention(sizes: Sizes, place: Place) -> Operation:
    """`sizes`: (batch, heads, tokens, elements of a head, dropout, causal). Heads are views of one projection."""
    batch, heads, tokens, head, dropped, causal = sizes

    def eager(x: torch.Tensor) -> torch.Tensor:
        parts = x.view(batch, tokens, 3, heads, head).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(*parts, dropout_p=dropped, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    def ours(x: torch.Tensor) -> torch.Tensor:
        y = packed_attention(x.view(batch, tokens, 3, heads, head), causal=causal, dropout_p=dropped)
        return y.transpose(1, 2).flatten(2)

    return Operation(eager, ours, (place.draw(batch, tokens, 3 * heads * head),))


def of_projected_attention(sizes: Sizes, place: Place) -> Operation:
    """`sizes` as for `of_attention`. Queries, keys and values are linear layers of one input, without biases: the
    gradient of the keys' is zero but for rounding."""
    batch, heads, tokens, head, dropped, causal = sizes
    width = heads * head

    def split(part: torch.Tensor) -> torch.Tensor:
        return part.view(batch, tokens, heads, head).transpose(1, 2)

    def eager(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        parts = (split(F.linear(x, weight)) for weight in weights)
        y = F.scaled_dot_product_attention(*parts, dropout_p=dropped, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    def ours(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor) -> torch.Tensor:
        shape = batch, heads, tokens, head
        y = calls.projected_attention(x, wq, wk, wv, None, None, None, shape, None, causal, dropped, x.dtype)
        return y.transpose(1, 2).flatten(2)

    weights = (place.draw(width, width).detach().div(width**0.5).requires_grad_() for _ in range(3))
    return Operation(eager, compiled(ours, place), (place.draw(batch, tokens, width), *weights))


def of_cross_entropy(sizes: Sizes, place: Place) -> Operation:
    rows, classes = sizes
    target = torch.randint(classes, (rows,), device=place.device)
    return Operation(F.cross_entropy, cross_entropy, (place.draw(rows, classes), target))


def of_linear_cross_entropy(sizes: Sizes, place: Place) -> Operation:
    rows, hidden, classes = sizes
    weight = (place.draw(classes, hidden).detach() / hidden**0.5).requires_grad_()
    return Operation(
        lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        linear_cross_entropy,
        (place.draw(rows, hidden), weight, torch.randint(classes, (rows,), device=place.device)),
    )


def of_batch_norm_relu(sizes: Sizes, place: Place, training: bool, last: bool) -> Operation:
    """As under autocast: weight, bias and statistics in fp32 whatever the dtype of x."""
    wide = Place(torch.float32, place.device)
    x = place.draw(*sizes).detach()
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    vectors = wide.draw(sizes[1]), wide.draw(sizes[1]), *torch.ones(2, sizes[1], device=place.device)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        return F.relu(F.batch_norm(x, mean, var, weight, bias, training, MOMENTUM, EPS), inplace=True)

    return Operation(eager, lambda *inputs: batch_norm_relu(*inputs, training, MOMENTUM, EPS), (x, *vectors))


def of_max_pool(sizes: Sizes, place: Place, last: bool) -> Operation:
    """`sizes`: (batch, channels, height, width, side of a window, stride, padding)."""
    *shape, side, stride, padding = sizes
    x = place.draw(*shape).detach()
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    return Operation(
        lambda x: F.max_pool2d(x, side, stride, padding), lambda x: max_pool(x, side, stride, padding), (x,)
    )


def of_patch_convolution(sizes: Sizes, place: Place) -> Operation:
    """`sizes`: (batch, channels, side, channels of the result, side of a patch). An image needs no gradient."""
    batch, channels, side, out, patch = sizes
    x = place.draw(batch, channels, side, side)
    inputs = x.detach() if channels == IMAGE else x, place.draw(out, channels, patch, patch), place.draw(out)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, bias, stride=patch)

    return Operation(eager, compiled(calls.patch_convolution, place), inputs)


def of_stem_convolution(sizes: Sizes, place: Place) -> Operation:
    """`sizes`: (batch, side, channels of the result, side of a window, stride, padding). An image needs no gradient."""
    batch, side, out, window, stride, padding = sizes
    x = place.draw(batch, IMAGE, side, side).detach().contiguous(memory_format=torch.channels_last)
    weight = place.draw(out, IMAGE, window, window).detach().contiguous(memory_format=torch.channels_last)

    def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, stride=stride, padding=padding)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return stem_convolution(x, weight, (stride, stride), (padding, padding))

    return Operation(eager, compiled(ours, place), (x, weight.requires_grad_()))


def of_pointwise_convolution(sizes: Sizes, place: Place) -> Operation:
    """`sizes`: (batch, channels, channels of the result, side). With batch norm and ReLU, as under autocast."""
    batch, channels, out, side = sizes
    wide = Place(torch.float32, place.device)
    x = place.draw(batch, channels, side, side).detach().contiguous(memory_format=torch.channels_last)
    weight = (wide.draw(out, channels, 1, 1).detach() / channels**0.5).requires_grad_()
    running = torch.zeros(out, device=place.device), torch.ones(out, device=place.device)

    def eager(*inputs: torch.Tensor) -> torch.Tensor:
        x, weight, gain, bias, mean, variance = inputs
        y = F.conv2d(x, weight.to(x.dtype))
        return F.relu(F.batch_norm(y, mean, variance, gain, bias, True, MOMENTUM, EPS), inplace=True)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        return F.relu(calls.pointwise_convolution(*inputs, MOMENTUM, EPS, place.dtype), inplace=True)

    inputs = x.requires_grad_(), weight, wide.draw(out), wide.draw(out), *running
    return Operation(eager, compiled(ours, place), inputs)


def compiled(function: Function, place: Place) -> Function:
    """A call with operations of torch around its kernel, if any, as it is in a compiled step; on a CPU as it is."""
    return torch.compile(function, dynamic=False, fullgraph=True) if place.device.type == "cuda" else function


def of_update(sizes: Sizes, place: Place) -> Update:
    """`sizes` of the parameters, or the name of a model in the zoo."""
    return Update(parameter_sizes(sizes) if isinstance(sizes, str) else sizes, place)


def of_casts(sizes: Sizes, place: Place, back: bool) -> Casts:
    """`sizes` of the tensors, or the name of a model in the zoo, whose parameters they are."""
    return Casts(parameter_sizes(sizes) if isinstance(sizes, str) else sizes, place, back)


def parameter_sizes(model: str) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in ZOO[model].base.model().parameters()]


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    shapes: Mapping[str, Sizes]
    make: Callable[[Sizes, Place], Operation | Update | Casts]
    dtypes: tuple[str, ...] = tuple(DTYPES)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("layer_norm", HIDDEN, of_layer_norm),
        Kernel("rms_norm", HIDDEN, of_rms_norm),
        Kernel("add_layer_norm", HIDDEN, of_add_layer_norm),
        Kernel("add_rms_norm", HIDDEN, of_add_rms_norm),
        Kernel("softmax_causal", CAUSAL, of_softmax_causal),
        Kernel("softmax_masked", MASKED, of_softmax_masked),
        *(Kernel(f"bias_{kind}", INNER, partial(of_bias_activation, kind=kind)) for kind in KINDS),
        Kernel("mlp_gelu", BLOCKS, partial(of_mlp, kind="gelu"), ("bf16", "fp16")),
        Kernel("gated_mlp", GATED_BLOCKS, partial(of_gated_mlp, kind="silu"), ("bf16", "fp16")),
        Kernel("swiglu", GATED, of_swiglu),
        Kernel("dropout_add", HIDDEN, of_dropout_add),
        Kernel("rope", HEADS, of_rope),
        Kernel("attention", PROJECTED, of_attention, ("bf16", "fp16")),
        Kernel("projected_attention", PROJECTED, of_projected_attention, ("bf16", "fp16")),
        Kernel("cross_entropy", CLASSES, of_cross_entropy),
        Kernel("linear_cross_entropy", HIDDEN_CLASSES, of_linear_cross_entropy),
        Kernel("batch_norm_relu_train", STAGES, partial(of_batch_norm_relu, training=True, last=False)),
        Kernel("batch_norm_relu_train_last", STAGES, partial(of_batch_norm_relu, training=True, last=True)),
        Kernel("batch_norm_relu_eval", STAGES, partial(of_batch_norm_relu, training=False, last=False)),
        Kernel("batch_norm_relu_eval_last", STAGES, partial(of_batch_norm_relu, training=False, last=True)),
        Kernel("max_pool", POOLS, partial(of_max_pool, last=False)),
        Kernel("max_pool_last", POOLS, partial(of_max_pool, last=True)),
        Kernel("patch_convolution", PATCHES, of_patch_convolution),
        Kernel("stem_convolution", STEMS, of_stem_convolution, ("bf16", "fp16")),
        Kernel("pointwise_convolution", BOTTLENECKS, of_pointwise_convolution, ("bf16", "fp16")),
        Kernel("adamw", MODELS, of_update, ("fp32",)),
        Kernel("casts", MODELS, partial(of_casts, back=False), ("bf16", "fp16")),
        Kernel("casts_back", MODELS, partial(of_casts, back=True), ("bf16", "fp16")),
    )
}
