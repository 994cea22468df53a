"""Llama (Touvron et al. 2023; grouped heads: Grattafiori et al. 2024), which predicts the next token.

Sizes and order of operations are those of Hugging Face's LlamaForCausalLM with SDPA attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tuner.zoo.recipe import TRANSFORMER_LEARNING_RATE, Recipe, Tokens, ZooModel, next_token_loss

INITIAL_STD = 0.02
LONGEST = 2**20  # tokens in a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """The defaults are as wide as GPT-2 small. Each key and value head serves `heads / key_heads` query heads."""

    vocabulary: int = 32000
    max_seq: int = 2048
    width: int = 768
    hidden: int = 2048
    layers: int = 12
    heads: int = 12
    key_heads: int = 12
    theta: float = 10000.0
    is_tied: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SMALL = LlamaSizes()
#: Llama 3.2 1B, without the scaling of its rotation for long texts.
BILLION = LlamaSizes(
    vocabulary=128256, max_seq=8192, width=2048, hidden=8192, layers=16, heads=32, key_heads=8, theta=5e5, is_tied=True
)
#: Four layers as wide as those of Llama 3 8B.
WIDE = LlamaSizes(max_seq=8192, width=4096, hidden=14336, layers=4, heads=32, key_heads=8, theta=5e5)
TINY = LlamaSizes(vocabulary=500, max_seq=64, width=64, hidden=128, layers=2, heads=4, key_heads=2)


def rotation(sizes: LlamaSizes) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_seq, head width] of the rotary embedding (Su et al. 2021); halves have the same angles."""
    rates = sizes.theta ** -(torch.arange(0, sizes.head_width, 2, dtype=torch.float32) / sizes.head_width)
    angles = torch.arange(sizes.max_seq, dtype=torch.float32)[:, None] * rates
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[batch, heads, seq, head width], each pair of elements a half apart turned by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, and fewer heads of keys and values than of queries."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        narrow = sizes.key_heads * sizes.head_width
        self.sizes = sizes
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, narrow, bias=False)
        self.value = nn.Linear(sizes.width, narrow, bias=False)
        self.output = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.sizes.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = (rotated(part, cosines, sines) for part in (query, key))
        shared = self.sizes.heads // self.sizes.key_heads
        if shared > 1:
            key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = norm(sizes)
        self.attention = Attention(sizes)
        self.feed_forward_norm = norm(sizes)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Token embedding, a causal pre-norm decoder with rotary positions, and a head."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, sizes: LlamaSizes = SMALL) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = norm(sizes)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.is_tied:
            self.head.weight = self.tokens.weight
        for name, table in zip(("cosines", "sines"), rotation(sizes), strict=True):
            self.register_buffer(name, table, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [batch, seq] -> logits [batch, seq, vocabulary]."""
        seq = input_ids.shape[1]
        cosines, sines = self.cosines[:seq], self.sines[:seq]
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.head(self.norm(x))


def norm(sizes: LlamaSizes) -> nn.RMSNorm:
    return nn.RMSNorm(sizes.width, eps=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRecipe(Recipe):
    """A model whose tables of positions are as long as its sequences, if these are longer than what is usual."""

    sizes: LlamaSizes

    def resized(self, chosen: Mapping[str, int]) -> "LlamaRecipe":
        sizes = replace(self.sizes, max_seq=max(self.sizes.max_seq, chosen.get("seq", 0)))
        return replace(self, model=partial(Llama, sizes), data=self.data.resized(chosen))


def _tokens(sizes: LlamaSizes, *, batch: int, seq: int, max_seq: int) -> Tokens:
    return Tokens(batch=batch, seq=seq, max_seq=max_seq, vocabulary=sizes.vocabulary, classes=None)


TINY_RECIPE = Recipe(
    model=partial(Llama, TINY), data=_tokens(TINY, batch=4, seq=32, max_seq=TINY.max_seq), loss_fn=next_token_loss
)


def _entry(name: str, meaning: str, sizes: LlamaSizes, *, batch: int, seq: int) -> ZooModel:
    return ZooModel(
        name=name,
        meaning=meaning,
        base=LlamaRecipe(
            model=partial(Llama, sizes),
            sizes=sizes,
            data=_tokens(sizes, batch=batch, seq=seq, max_seq=LONGEST),
            loss_fn=next_token_loss,
            learning_rate=TRANSFORMER_LEARNING_RATE,
        ),
        tiny=TINY_RECIPE,
    )


ENTRIES = (
    _entry(
        "llama_125m",
        "Llama as wide as GPT-2 small: RMSNorm, rotary positions and SwiGLU, which compilers fuse in different ways",
        SMALL,
        batch=8,
        seq=1024,
    ),
    _entry(
        "llama_1b",
        "Llama 3.2 1B: grouped heads, and a vocabulary of 128 256 whose logits take more memory than the layers",
        BILLION,
        batch=2,
        seq=2048,
    ),
    _entry(
        "llama_wide",
        "four layers of the width of Llama 3 8B: matrix products large enough for lower formats",
        WIDE,
        batch=2,
        seq=2048,
    ),
)
