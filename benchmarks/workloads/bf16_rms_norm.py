"""A transformer whose weights are bf16 and whose norms are torch's RMSNorm, 8 x 1024 tokens.

Built after https://github.com/pytorch/pytorch/issues/188955. Since torch 2.12 autocast computes rms_norm in fp32, also
where input and weight are bf16 already. Compiled under autocast on a B200, such a step had many kernels that only cast,
was slower and needed more memory. Sizes are our choice. The step as given is without autocast; plain torch's modes in
the benchmarks are with it, as in that thread. torch 2.11 and older do not show it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kitsune import Workload

VOCABULARY = 32000


class Block(nn.Module):
    """[batch, seq, width] -> the same: causal attention, then a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, hidden = heads, 8 * width // 3
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.heads_in, self.heads_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.heads_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.heads_out(mixed.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Tokens int64 [batch, seq] -> logits fp32 [batch * seq, vocabulary]."""

    def __init__(self, seq: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1).float()


def workload_of(batch: int, seq: int, *, width: int = 768, layers: int = 12, heads: int = 12) -> Workload:
    model = Transformer(seq, width, layers, heads).to(torch.bfloat16).train()
    tokens = torch.randint(0, VOCABULARY, (batch, seq + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, F.cross_entropy, optimizer, (tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()))


def make_workload() -> Workload:
    return workload_of(8, 1024)
