"""GPT-2 (Radford et al. 2019), which predicts the next token."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tuner.zoo.attention import SelfAttention
from tuner.zoo.recipe import TRANSFORMER_LEARNING_RATE, Recipe, Tokens, ZooModel, next_token_loss

INITIAL_STD = 0.02
LAST_OF_BRANCH = ("attention.1.projection_out.weight", "feed_forward.3.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSizes:
    """The defaults are GPT-2 small. The feed-forward layers are four times as wide as the model."""

    vocabulary: int = 50257
    max_seq: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1


BASE = GPTSizes()
TINY = GPTSizes(vocabulary=500, max_seq=64, width=64, layers=2, heads=4)


class Block(nn.Module):
    """Pre-norm causal attention and feed-forward, each with its residual."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(sizes.width),
            SelfAttention(sizes.width, sizes.heads, dropout=sizes.dropout, causal=True),
            nn.Dropout(sizes.dropout),
        )
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(sizes.width),
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * sizes.width, sizes.width),
            nn.Dropout(sizes.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Token and position embeddings, a causal pre-norm decoder, and a head tied to the token embedding."""

    def __init__(self, sizes: GPTSizes = BASE) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.max_seq, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.decoder = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)), nn.LayerNorm(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(sizes.layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [batch, seq] -> logits [batch, seq, vocabulary]."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.dropout(self.tokens(input_ids) + self.positions(places))
        return self.head(self.decoder(embedded))

    def _initialise(self, layers: int) -> None:
        """Normal weights; those of the last layer of a residual branch / sqrt(number of branches), section 2.3."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(LAST_OF_BRANCH):
                nn.init.normal_(weight, std=INITIAL_STD / math.sqrt(2 * layers))


def _tokens(sizes: GPTSizes, *, batch: int, seq: int) -> Tokens:
    return Tokens(batch=batch, seq=seq, max_seq=sizes.max_seq, vocabulary=sizes.vocabulary, classes=None)


ENTRY = ZooModel(
    name="gpt2_small",
    meaning="GPT-2 small predicting the next token: a large tied vocabulary, where the loss itself is worth fusing",
    base=Recipe(
        model=GPT,
        data=_tokens(BASE, batch=8, seq=512),
        loss_fn=next_token_loss,
        learning_rate=TRANSFORMER_LEARNING_RATE,
    ),
    tiny=Recipe(model=partial(GPT, TINY), data=_tokens(TINY, batch=4, seq=32), loss_fn=next_token_loss),
)
