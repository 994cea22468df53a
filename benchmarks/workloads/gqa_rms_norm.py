"""A small transformer with grouped-query attention, RMSNorm and an MLP of squared leaky ReLUs, 32 x 1024 tokens.

Built after https://github.com/pytorch/pytorch/issues/179423 (fix proposed in pull request 179494). There Inductor fused
too much into one mix-order reduction of such a backward on an H100; the kernel spilled registers, and a step took
6.3 ms longer. Widths and heads are of that kind; depth and batch are our choice.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kitsune import Workload


class RMSNorm(nn.Module):
    """Without a weight; any shape, over the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),))


class Attention(nn.Module):
    """[batch, seq, width] -> the same; each key and value head serves heads / key_heads query heads."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * key_heads * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.norm = RMSNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        pair = self.key_value(x).unflatten(-1, (2, self.key_heads, self.size)).permute(2, 0, 3, 1, 4)
        key, value = pair.repeat_interleave(self.heads // self.key_heads, dim=2)
        mixed = F.scaled_dot_product_attention(self.norm(query), self.norm(key), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(), Attention(width, heads, key_heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.leaky_relu(self.up(self.norm(x)), 0.5).square())


class Transformer(nn.Module):
    """Tokens int64 [batch, seq] -> logits [batch * seq, vocabulary]; the head is the embedding's weight."""

    def __init__(self, vocabulary: int, seq: int, width: int, layers: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, heads, key_heads) for _ in range(layers)))
        self.norm = RMSNorm()
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        return F.linear(self.norm(self.blocks(x)).flatten(0, 1), self.tokens.weight)


def workload_of(
    batch: int, seq: int, *, width: int = 512, layers: int = 9, heads: int = 8, key_heads: int = 4
) -> Workload:
    model = Transformer(1024, seq, width, layers, heads, key_heads).train()
    tokens = torch.randint(0, 1024, (batch, seq + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, F.cross_entropy, optimizer, (tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()))


def make_workload() -> Workload:
    return workload_of(32, 1024)
