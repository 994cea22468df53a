"""The cases of suite kernels: what users write in torch, our kernel of it, and the sizes in which models ask for it.

Sizes go in; runs come out, one for each arm, all on the same inputs: forward and backward, an optimizer's update, or
casts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kitsune.fusion import calls
from kitsune.kernels.adamw import adamw_
from kitsune.kernels.add_norm import add_layer_norm, add_rms_norm
from kitsune.kernels.batch_norm_relu import batch_norm_relu
from kitsune.kernels.bias_activation import KINDS, bias_activation
from kitsune.kernels.casts import cast_all
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

EPS = 1e-5
MOMENTUM = 0.1
DROPPED = 0.1
IMAGE = 3  # channels
SCALE = 0.125  # one over the root of a head's 64 elements
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

Sizes = Sequence[Any]
Run = Callable[[], Any]
Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


class Place(NamedTuple):
    """In which dtype and where to measure."""

    dtype: torch.dtype
    device: torch.device

    def draw(self, *sizes: int) -> torch.Tensor:
        """An input of which the gradient is asked for."""
        return torch.randn(sizes, dtype=self.dtype, device=self.device).requires_grad_()


@dataclass(frozen=True, slots=True)
class Operation:
    """What users write in torch, and our kernel of it, on the same inputs."""

    eager: Function
    kitsune: Function
    inputs: tuple[torch.Tensor, ...]

    def builds(self) -> Mapping[str, Callable[[], Run]]:
        """A run gives (outputs, gradients). fullgraph: Inductor compiles all of it, or the arm fails and says so."""
        with torch.no_grad():
            gradients = [
                torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in listed(self.eager, self.inputs)
            ]
        functions: Mapping[str, Callable[[], Function]] = {
            "eager": lambda: self.eager,
            "inductor": lambda: torch.compile(self.eager, dynamic=False, fullgraph=True),
            "kitsune": lambda: self.kitsune,
        }
        return {arm: partial(self.run_of, function, gradients) for arm, function in functions.items()}

    def run_of(self, function: Callable[[], Function], gradients: list[torch.Tensor]) -> Run:
        made, leaves = function(), [tensor for tensor in self.inputs if tensor.requires_grad]

        def run() -> Any:
            outputs = listed(made, self.inputs)
            return outputs, torch.autograd.grad(outputs, leaves, gradients)

        return run


def listed(function: Function, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    outputs = function(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True, slots=True)
class Update:
    """One step of AdamW over parameters of these sizes; each arm has its own. A run gives the parameters."""

    sizes: Sizes
    place: Place

    def builds(self) -> Mapping[str, Callable[[], Run]]:
        return {"eager": self.fused, "inductor": self.compiled, "kitsune": self.ours}

    def parameters(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        drawn = [self.place.draw(*size) for size in self.sizes]
        for parameter in drawn:
            parameter.grad = torch.randn_like(parameter)
        return drawn

    def of_torch(self, parameters: list[torch.Tensor], **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **ADAMW, **implementation, capturable=self.place.device.type == "cuda")

    def fused(self) -> Run:
        parameters = self.parameters()
        optimizer = self.of_torch(parameters, fused=True)

        def run() -> Any:
            optimizer.step()
            return parameters

        return run

    def compiled(self) -> Run:
        parameters = self.parameters()
        optimizer = self.of_torch(parameters, foreach=True)
        optimizer.step()  # makes the states: compiled without them, the step would be compiled twice

        @torch.compile(dynamic=False)
        def step() -> None:
            optimizer.step()

        def run() -> Any:
            step()
            return parameters

        return run

    def ours(self) -> Run:
        parameters = self.parameters()
        gradients = [parameter.grad for parameter in parameters]
        states = [[torch.zeros_like(each) for each in parameters] for _ in range(2)]
        factors = (ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
        # A step for each parameter, as torch keeps them and as a plan has them updated.
        steps = [torch.zeros((), device=self.place.device) for _ in parameters]

        def run() -> Any:
            torch._foreach_add_(steps, 1)
            adamw_(parameters, gradients, *states, steps, *factors)
            return parameters

        return run


@dataclass(frozen=True, slots=True)
class Casts:
    """Tensors of these sizes from fp32 to the place's dtype, or `back`; each arm has its own. A run gives the casts."""

    sizes: Sizes
    place: Place
    back: bool

    def builds(self) -> Mapping[str, Callable[[], Run]]:
        functions: Mapping[str, Callable[..., Any]] = {
            "eager": torch._foreach_copy_,
            "inductor": torch.compile(copied, dynamic=False, fullgraph=True),
            "kitsune": cast_all,
        }
        return {arm: partial(self.run_of, function) for arm, function in functions.items()}

    def run_of(self, function: Callable[..., Any]) -> Run:
        torch.manual_seed(0)
        wide = [torch.randn(size, device=self.place.device) for size in self.sizes]
        narrow = [one.to(self.place.dtype) for one in wide]
        targets, sources = (wide, narrow) if self.back else (narrow, wide)

        def run() -> Any:
            function(targets, sources)
            return targets

        return run


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


def of_joined_linear(sizes: Sizes, place: Place) -> Operation:
    """`sizes`: (rows, width, widths of the results...)."""
    rows, width, *wide = sizes

    def eager(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in weights)

    def ours(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return calls.joined_linear(x, x.dtype, len(weights), *weights)

    weights = (place.draw(each, width).detach().div(width**0.5).requires_grad_() for each in wide)
    return Operation(eager, compiled(ours, place), (place.draw(rows, width), *weights))


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


def copied(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def of_casts(sizes: Sizes, place: Place, back: bool) -> Casts:
    """`sizes` of the tensors, or the name of a model in the zoo, whose parameters they are."""
    return Casts(parameter_sizes(sizes) if isinstance(sizes, str) else sizes, place, back)


def parameter_sizes(model: str) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in ZOO[model].base.model().parameters()]


# In which sizes -------------------------------------------------------------------------------------------------------

TOKENS = {"bert_base-2x128": 256, "bert_base-16x128": 2048, "gpt2_small-8x512": 4096, "vit_b16-64": 64 * 197}
LLAMA_TOKENS = {"llama_8b-1x2048": 2048, "llama_8b-4x2048": 8192}
#: (rows, hidden)
HIDDEN = {name: (rows, 768) for name, rows in TOKENS.items()} | {
    name: (rows, 4096) for name, rows in LLAMA_TOKENS.items()
}
#: (rows, width within the feed-forward block)
INNER = {name: (rows, 3072) for name, rows in TOKENS.items()} | {
    name: (rows, 14336) for name, rows in LLAMA_TOKENS.items()
}
#: (rows, hidden, width within the block)
BLOCKS = {name: (rows, 768, 3072) for name, rows in TOKENS.items()} | {
    "bert_large-16x128": (2048, 1024, 4096),
    "wide-8x512": (4096, 2048, 8192),
}
#: The same
GATED_BLOCKS = {
    "llama_125m-1x1024": (1024, 768, 2048),
    "llama_125m-8x1024": (8192, 768, 2048),
    "tinyllama-1x2048": (2048, 2048, 5632),
    "llama_1b-2x2048": (4096, 2048, 8192),
    "llama_8b-1x2048": (2048, 4096, 14336),
    "llama_wide-2x2048": (4096, 4096, 14336),
}
GATED = {
    "tinyllama-1x2048": (2048, 5632),
    "llama_1b-1x2048": (2048, 8192),
    "llama_1b-8x2048": (16384, 8192),
    "llama_8b-1x512": (512, 14336),
    "llama_8b-1x2048": (2048, 14336),
    "llama_8b-4x2048": (8192, 14336),
}
#: (batch, heads, tokens)
CAUSAL = {
    "gpt2_small-1x128": (1, 12, 128),
    "gpt2_small-2x256": (2, 12, 256),
    "gpt2_small-8x512": (8, 12, 512),
    "gpt2_small-8x1024": (8, 12, 1024),
    "gpt2_medium-4x1000": (4, 16, 1000),
    "llama_8b-1x2048": (1, 32, 2048),
}
MASKED = {
    "bert_base-2x128": (2, 12, 128),
    "bert_base-16x128": (16, 12, 128),
    "bert_base-16x384": (16, 12, 384),
    "bert_base-16x500": (16, 12, 500),
    "bert_large-8x512": (8, 16, 512),
    "llama_8b-2x2048": (2, 32, 2048),
}
#: (batch, heads, tokens, elements of a head)
HEADS = {
    "modernbert_base-2x128": (2, 12, 128, 64),
    "modernbert_base-16x512": (16, 12, 512, 64),
    "llama_1b-1x2048": (1, 32, 2048, 64),
    "llama_1b-8x2048": (8, 32, 2048, 64),
    "llama_8b-1x2048": (1, 32, 2048, 128),
    "llama_8b-4x2048": (4, 32, 2048, 128),
}
#: (batch, heads, tokens, elements of a head, dropout, causal)
PROJECTED = {
    "vit_b16-64": (64, 12, 197, 64, 0.0, False),
    "vit_s32-64": (64, 6, 50, 64, 0.0, False),
    "bert_base-2x128": (2, 12, 128, 64, DROPPED, False),
    "bert_base-16x128": (16, 12, 128, 64, DROPPED, False),
    "bert_large-16x128": (16, 16, 128, 64, DROPPED, False),
    "gpt2_small-16x256": (16, 12, 256, 64, DROPPED, True),
    "llama_125m-32x256": (32, 12, 256, 64, 0.0, True),
}
#: (rows, width, widths of the results...)
JOINED = {
    "bert_base-2x128": (256, 768, 768, 768, 768),
    "llama_125m-8x1024": (8192, 768, 768, 768, 768),
    "llama_1b-1x2048": (2048, 2048, 2048, 512, 512),
    "llama_1b-8x2048": (16384, 2048, 2048, 512, 512),
    "llama_8b-1x2048": (2048, 4096, 4096, 1024, 1024),
    "t5_base-32x128": (4096, 768, 768, 768, 768),
}
#: (rows, hidden, classes)
HIDDEN_CLASSES = {
    "bert_base-2x128": (256, 768, 30522),
    "bert_base-16x128": (2048, 768, 30522),
    "gpt2_small-2x512": (1024, 768, 50257),
    "gpt2_small-8x512": (4096, 768, 50257),
    "llama_1b-1x2048": (2048, 2048, 128256),
    "llama_8b-1x2048": (2048, 4096, 128256),
}
CLASSES = {name: (rows, classes) for name, (rows, _, classes) in HIDDEN_CLASSES.items() if name != "llama_1b-1x2048"}
CLASSES |= {"llama_8b-4x2048": (8192, 128256)}
#: (batch, channels, height, width); ResNet-18 on images of 32 x 32, ResNet-50 of 224 x 224
STAGES = {
    "resnet18-128-stage1": (128, 64, 32, 32),
    "resnet18-128-stage2": (128, 128, 16, 16),
    "resnet18-128-stage4": (128, 512, 4, 4),
    "resnet50-64-stem": (64, 64, 112, 112),
    "resnet50-64-stage3": (64, 256, 14, 14),
    "resnet50-64-stage4": (64, 512, 7, 7),
}
#: (batch, channels, height, width, side of a window, stride, padding)
POOLS = {
    "resnet50-64": (64, 64, 112, 112, 3, 2, 1),
    "resnet50-256": (256, 64, 112, 112, 3, 2, 1),
    "resnet18-128": (128, 64, 32, 32, 2, 2, 0),
    "densenet121-16": (16, 64, 64, 64, 3, 2, 1),
    "googlenet-16": (16, 192, 56, 56, 3, 2, 1),
    "vgg16-64": (64, 64, 224, 224, 2, 2, 0),
}
#: (batch, side, channels of the result, side of a window, stride, padding)
STEMS = {
    "resnet50-64": (64, 224, 64, 7, 2, 3),
    "resnet50-256": (256, 224, 64, 7, 2, 3),
    "resnet18-128": (128, 32, 64, 3, 1, 1),
    "vgg16-64": (64, 224, 64, 3, 1, 1),
    "densenet121-16": (16, 128, 64, 7, 2, 3),
    "efficientnet_b0-64": (64, 224, 32, 3, 2, 1),
}
#: (batch, channels, channels of the result, side)
BOTTLENECKS = {
    "resnet50-64-stage1-in": (64, 64, 64, 56),
    "resnet50-64-stage1-out": (64, 64, 256, 56),
    "resnet50-64-stage1-next": (64, 256, 64, 56),
    "resnet50-64-stage2-next": (64, 512, 128, 28),
    "resnet50-64-stage2-out": (64, 128, 512, 28),
    "resnet50-64-stage3-out": (64, 256, 1024, 14),
    "resnet50-64-stage4-out": (64, 512, 2048, 7),
    "resnet50-256-stage1-out": (256, 64, 256, 56),
}
#: (batch, channels, side, channels of the result, side of a patch)
PATCHES = {
    "vit_b16-4": (4, 3, 224, 768, 16),
    "vit_b16-64": (64, 3, 224, 768, 16),
    "vit_s32-64": (64, 3, 224, 384, 32),
    "convnext_tiny-64-stem": (64, 3, 224, 96, 4),
    "convnext_tiny-64-stage2": (64, 96, 56, 192, 2),
    "convnext_tiny-64-stage4": (64, 384, 14, 768, 2),
}
#: Models of the zoo, whose parameters are updated or cast.
MODELS = {name: name for name in ("lenet5", "resnet18", "resnet50", "bert_base", "vit_b16", "gpt2_small")}


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
        Kernel("joined_linear", JOINED, of_joined_linear, ("bf16", "fp16")),
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
