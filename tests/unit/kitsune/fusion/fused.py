"""Small modules of each pattern, and a way to have them fused on a CPU: a clock that finds every kernel faster."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kitsune.fusion import FusionConfig, FusionEngine, FusionStats
from kitsune.fusion.patterns import PATTERNS
from kitsune.kernels.dtypes import DTYPES

WIDTH = 8


def always_faster(original: Any, fused: Any) -> tuple[float, float]:
    return 2.0, 1.0


def engine(clock: Any = always_faster, compiler: Any = "eager", **config: Any) -> FusionEngine:
    """With every pattern offered in every dtype: fp32 shows what the roundings of half precision would hide."""
    torch._dynamo.reset()
    fusing = FusionEngine(FusionConfig(**config), clock=clock, compiler=compiler)
    for pattern in reversed(PATTERNS):
        fusing.register_pattern(replace(pattern, dtypes=DTYPES))
    return fusing


def stats_of(function: Any, *inputs: Any, **config: Any) -> FusionStats:
    """What is found in a function at a call with these inputs."""
    fusing = engine(**config)
    fusing.fuse(function)(*inputs)
    return fusing.get_fusion_stats()


def step(function: Any, parameters: Any, *inputs: Any) -> list[torch.Tensor | None]:
    """(the result, the gradients of parameters and of those inputs that ask for one)."""
    leaves = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
    torch.manual_seed(3)
    result = function(*leaves)
    weights = torch.linspace(-1, 2, result.numel()).view_as(result)
    asked = [*parameters, *(leaf for leaf in leaves if leaf.requires_grad)]
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), asked, allow_unused=True)]


class Norm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class RmsNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH, eps=1e-6)


class WrittenRmsNorm(nn.Module):
    """As Llama of Hugging Face has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(dtype)


class AddNorm(nn.Module):
    """The residual stream goes on beside the norm."""

    def __init__(self, norm: type[nn.Module] = Norm) -> None:
        super().__init__()
        self.norm = norm()

    def forward(self, x, branch):
        x = x + branch
        return self.norm(x) * 2 - x


class AddRmsNorm(AddNorm):
    def __init__(self) -> None:
        super().__init__(WrittenRmsNorm)


class Activated(nn.Module):
    def __init__(self, activation: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.activation = activation or nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.activation(self.linear(x))


class Mlp(nn.Module):
    """Of a transformer; `dropout` follows the activation."""

    def __init__(self, activation: Any = None, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.activation = activation or nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(3 * WIDTH, 2 * WIDTH, bias=bias)

    def forward(self, x):
        return self.down(self.dropout(self.activation(self.up(x))))


class Conv1D(nn.Module):
    """As transformers has it: a linear layer whose weight lies transposed."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.out = out
        self.weight = nn.Parameter(torch.randn(width, out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.out)


class Conv1DMlp(nn.Module):
    """Of GPT-2 in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x):
        return self.down(new_gelu(self.up(x)))


def new_gelu(x):
    """As GPT-2 of Hugging Face has it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x):
    """As FastGELUActivation of Hugging Face has it."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def megatron_gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_by_erf(x):
    """As the first BERT had it."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_by_methods(x):
    return ((x / 2**0.5).erf() + 1).mul(x).div(2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class GatedMlp(Gated):
    """The block of Llama; `dropout` follows the product."""

    def __init__(self, activation: Any = F.silu, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))


class TurnedGatedMlp(GatedMlp):
    """Its factors in the other order."""

    def forward(self, x):
        return self.down(self.up(x) * self.activation(self.gate(x)))


class JoinedGatedMlp(nn.Module):
    """The block of Phi-3 and ModernBERT, whose gate is the first half of a layer."""

    def __init__(self, activation: Any = F.silu, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.gate_and_up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(self.dropout(up * self.activation(gate)))


class Rotary(nn.Module):
    """The queries of Llama as Hugging Face has them; `heads` is the dimension in which the heads are."""

    def __init__(self, heads: int = 1, turned: Any = None) -> None:
        super().__init__()
        self.heads, self.turned = heads, turned or llama_heads
        self.q = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.register_buffer("frequencies", 100.0 ** -torch.linspace(0, 1, WIDTH // 2))

    @torch.no_grad()
    def angles(self, x):
        angles = torch.arange(x.shape[1], dtype=torch.float32)[None, :, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * 1.5).to(x.dtype), (angles.sin() * 1.5).to(x.dtype)

    def forward(self, x):
        q = self.q(x).view(*x.shape[:-1], 2, WIDTH)
        cos, sin = self.angles(x)
        return self.turned(q.transpose(1, 2) if self.heads == 1 else q, cos, sin, self.heads)


def llama_heads(x, cos, sin, heads):
    cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
    rotated = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return (x * cos) + (rotated * sin)


def chunked_heads(x, cos, sin, heads):
    """In another order."""
    cos, sin = (angle[:, None] if heads == 1 else angle[:, :, None] for angle in (cos, sin))
    low, high = x.chunk(2, -1)
    return sin * torch.cat((high.neg(), low), -1) + cos * x


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm(self.convolution(x)))


class Pointwise(nn.Sequential):
    """A convolution of single positions and its batch norm, in training, as in the bottlenecks of a ResNet."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nn.Conv2d(WIDTH, 16, 1, **{"bias": False} | settings), nn.BatchNorm2d(16, momentum=0.3))


class Bottleneck(nn.Module):
    """The last layer of one, with what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = Pointwise(), nn.ReLU(inplace=True)

    def forward(self, x, residual):
        y = self.layer(x)
        y += residual
        return self.relu(y)


class Attention(nn.Module):
    """nanoGPT's, without flash attention."""

    def forward(self, scores):
        size = scores.shape[-1]
        mask = torch.triu(torch.ones(size, size), diagonal=1).bool()
        return F.softmax((scores * 0.5).masked_fill(mask, float("-inf")), dim=-1)


class Masked(nn.Module):
    def forward(self, scores, mask):
        return torch.softmax(scores / 4 + mask, -1)


class Heads(nn.Module):
    """Self-attention, as in a transformer's block."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.qkv, self.settings = nn.Linear(WIDTH, 3 * 32), settings

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, **self.settings).transpose(1, 2).flatten(2)


class Projected(nn.Module):
    """Self-attention whose queries, keys and values have a layer each, as in BERT."""

    def __init__(self, bias: bool = True, **settings: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, 32, bias) for _ in range(3))
        self.settings = settings

    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], 2, 16).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, **self.settings).transpose(1, 2).flatten(2)


class Encoded(nn.Module):
    """`nn.MultiheadAttention`, as in `nn.TransformerEncoderLayer`: what follows reads it through views."""

    def __init__(self, batch_first: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.wider = nn.Linear(WIDTH, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=batch_first)
        self.causal = causal

    def forward(self, x):
        x = self.wider(x)
        positions = x.shape[1 if self.attention.batch_first else 0]
        mask = torch.ones(positions, positions, dtype=torch.bool).triu(1) if self.causal else None
        y, _ = self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=self.causal)
        return x + y


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, residual):
        return residual + self.dropout(x)


class Head(nn.Module):
    """The end of a language model with its loss."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 13, bias=bias)

    def forward(self, x, target):
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 13), target.view(-1), ignore_index=3, label_smoothing=0.1)


class TurnedHead(Head):
    def forward(self, x, target):
        logits = x @ self.head.weight.T
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Loss(nn.Module):
    def forward(self, logits, target):
        return F.cross_entropy(logits, target)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def images(channels: int, seed: int = 0) -> torch.Tensor:
    """Images that are channels last."""
    drawn = normal(2, channels, 5, 4, seed=seed).detach()
    return drawn.contiguous(memory_format=torch.channels_last).requires_grad_()


TARGETS = torch.tensor([[1, 2, 3], [4, 12, 0]])
ROWS = normal(2, 3, WIDTH)
#: What is found in place of a pattern after torch.export, which takes such a layer apart.
AS_EXPORTED = {"multi_head_attention": "attention"}
#: Name of the pattern, of the case, the module, what it is called with.
CASES: dict[str, tuple[str, Any, tuple[torch.Tensor, ...]]] = {
    "LayerNorm": ("layer_norm", Norm, (ROWS,)),
    "RMSNorm": ("rms_norm", RmsNorm, (ROWS,)),
    "the RMSNorm of Llama": ("rms_norm", WrittenRmsNorm, (ROWS,)),
    "a residual and LayerNorm": ("add_layer_norm", AddNorm, (ROWS, normal(2, 3, WIDTH, seed=1))),
    "a residual and RMSNorm": ("add_rms_norm", AddRmsNorm, (ROWS, normal(2, 3, WIDTH, seed=1))),
    "GELU by tanh": ("linear_activation", Activated, (ROWS,)),
    "GELU": ("linear_activation", lambda: Activated(nn.GELU()), (ROWS,)),
    "the GELU of GPT-2": ("linear_activation", lambda: Activated(new_gelu), (ROWS,)),
    "the fast GELU": ("linear_activation", lambda: Activated(fast_gelu), (ROWS,)),
    "the GELU of Megatron": ("linear_activation", lambda: Activated(megatron_gelu), (ROWS,)),
    "the GELU of BERT": ("linear_activation", lambda: Activated(gelu_by_erf), (ROWS,)),
    "GELU by methods": ("linear_activation", lambda: Activated(gelu_by_methods), (ROWS,)),
    "SiLU": ("linear_activation", lambda: Activated(nn.SiLU()), (ROWS,)),
    "ReLU in place": ("linear_activation", lambda: Activated(nn.ReLU(inplace=True)), (ROWS,)),
    "a block": ("mlp", Mlp, (ROWS,)),
    "a block in eval": ("mlp", lambda: Mlp(nn.SiLU(), dropout=0.5).eval(), (ROWS,)),
    "a block with the GELU of GPT-2": ("mlp", lambda: Mlp(new_gelu), (ROWS,)),
    "the block of GPT-2": ("mlp", Conv1DMlp, (ROWS,)),
    "the block of CLIP": ("mlp", lambda: Mlp(lambda x: x * torch.sigmoid(1.702 * x)), (ROWS,)),
    "a block without biases": ("mlp", lambda: Mlp(nn.ReLU(), bias=False), (ROWS,)),
    "patches of SigLIP": (
        "patch_convolution",
        lambda: nn.Conv2d(3, 6, 2, stride=2, padding="valid"),
        (normal(2, 3, 4, 6),),
    ),
    "patches": ("patch_convolution", lambda: nn.Conv2d(3, 6, 2, stride=2), (normal(2, 3, 4, 6),)),
    "patches of a wide kernel": (
        "patch_convolution",
        lambda: nn.Conv2d(3, 6, (2, 3), stride=(2, 3), bias=False),
        (normal(2, 3, 4, 6),),
    ),
    "a stem": (
        "stem_convolution",
        lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False),
        (normal(2, 3, 7, 6).detach().contiguous(memory_format=torch.channels_last).requires_grad_(),),
    ),
    "a stem with a bias": (
        "stem_convolution",
        lambda: nn.Conv2d(4, 6, (2, 3), padding=(0, 1)),
        (normal(2, 4, 7, 6).detach().contiguous(memory_format=torch.channels_last).requires_grad_(),),
    ),
    "single positions": ("pointwise_convolution", Pointwise, (images(WIDTH),)),
    "the end of a bottleneck": ("pointwise_convolution", Bottleneck, (images(WIDTH), images(16, seed=1))),
    "SwiGLU": ("swiglu", Gated, (ROWS,)),
    "the block of Llama": ("gated_mlp", GatedMlp, (ROWS,)),
    "the block of Llama in eval": ("gated_mlp", lambda: GatedMlp(dropout=0.5).eval(), (ROWS,)),
    "a gated block with its factors turned": ("gated_mlp", TurnedGatedMlp, (ROWS,)),
    "a gated block with GELU": ("gated_mlp", lambda: GatedMlp(nn.GELU(approximate="tanh")), (ROWS,)),
    "a gated block with the GELU of GPT-2": ("gated_mlp", lambda: GatedMlp(new_gelu), (ROWS,)),
    "a gated block with the GELU of BERT": ("gated_mlp", lambda: GatedMlp(gelu_by_erf), (ROWS,)),
    "the block of Phi-3": ("gated_mlp", JoinedGatedMlp, (ROWS,)),
    "the block of ModernBERT in eval": ("gated_mlp", lambda: JoinedGatedMlp(nn.GELU(), dropout=0.5).eval(), (ROWS,)),
    "a gated block with ReLU": ("gated_mlp", lambda: GatedMlp(nn.ReLU(inplace=True)), (ROWS,)),
    "the heads of Llama": ("rope", Rotary, (ROWS,)),
    "heads within positions": ("rope", lambda: Rotary(heads=2), (ROWS,)),
    "heads in chunks": ("rope", lambda: Rotary(2, chunked_heads), (ROWS,)),
    "batch norm": ("batch_norm_relu", BatchNormed, (normal(2, 6, 5, 5),)),
    "batch norm in eval": ("batch_norm_relu", lambda: BatchNormed().eval(), (normal(2, 6, 5, 5),)),
    "max pool": ("max_pool", lambda: nn.MaxPool2d(3, 2, 1), (normal(2, 3, 7, 6),)),
    "max pool of another height": (
        "max_pool",
        lambda: nn.MaxPool2d((2, 3), (2, 1)),
        (normal(2, 3, 6, 5).detach().contiguous(memory_format=torch.channels_last).requires_grad_(),),
    ),
    "max pool of the size of its stride": ("max_pool", lambda: nn.MaxPool2d(2), (normal(2, 3, 6, 4),)),
    "causal attention": ("softmax", Attention, (normal(2, 4, 4),)),
    "attention": ("attention", Heads, (ROWS,)),
    "causal heads": ("attention", lambda: Heads(is_causal=True, scale=0.5), (ROWS,)),
    "attention of BERT": ("projected_attention", Projected, (ROWS,)),
    "causal attention without biases": (
        "projected_attention",
        lambda: Projected(bias=False, is_causal=True, scale=0.5),
        (ROWS,),
    ),
    "torch's own attention": ("multi_head_attention", lambda: Encoded(batch_first=True), (ROWS,)),
    "torch's own attention, positions first": ("multi_head_attention", Encoded, (ROWS,)),
    "torch's own attention, causal": ("multi_head_attention", lambda: Encoded(causal=True), (ROWS,)),
    "masked attention": ("softmax", Masked, (normal(2, 2, 4, 4), torch.zeros(2, 1, 1, 4))),
    "a head": ("linear_cross_entropy", Head, (ROWS, TARGETS)),
    "a head with a bias": ("linear_cross_entropy", lambda: Head(bias=True), (ROWS, TARGETS)),
    "a head of turned weights": ("linear_cross_entropy", TurnedHead, (ROWS, TARGETS)),
    "a loss": ("cross_entropy", Loss, (normal(6, 13), TARGETS.view(-1))),
}
