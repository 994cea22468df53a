"""Self-attention by torch's scaled_dot_product_attention, on tensors [batch, seq, width]."""

from torch import Tensor, nn
from torch.nn import functional


def attend(query: Tensor, key: Tensor, value: Tensor, *, heads: int, dropout: float, causal: bool = False) -> Tensor:
    """Multi-head attention over projected tensors [batch, seq, width]; the heads are merged again in the result."""
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """One matrix product for query, key and value, attention, and an output projection."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = nn.Dropout(dropout)  # never called; searches for dropout modules find p here
        self.causal = causal
        self.projection_in = nn.Linear(width, 3 * width)
        self.projection_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection_in(x).chunk(3, dim=-1)
        dropout = self.attention_dropout.p if self.training else 0.0
        return self.projection_out(attend(query, key, value, heads=self.heads, dropout=dropout, causal=self.causal))
