"""BERT (Devlin et al. 2018) for sequence classification.

Sizes and layer order are those of Hugging Face's BertForSequenceClassification with SDPA attention.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tuner.zoo.attention import attend
from tuner.zoo.recipe import TRANSFORMER_LEARNING_RATE, Recipe, Tokens, ZooModel

PADDING_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSizes:
    """The defaults are BERT-base, uncased."""

    vocabulary: int = 30522
    max_seq: int = 512
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    labels: int = 2
    dropout: float = 0.1


BASE = BertSizes()
LARGE = BertSizes(width=1024, layers=24, heads=16, hidden=4096)
TINY = BertSizes(vocabulary=1000, max_seq=64, width=64, layers=2, heads=4, hidden=128)


def norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-12)


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, normalised. Every token is of the first segment."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width, padding_idx=PADDING_ID)
        self.positions = nn.Embedding(sizes.max_seq, sizes.width)
        self.segments = nn.Embedding(2, sizes.width)
        self.norm = norm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        total = self.words(ids) + self.segments(torch.zeros_like(ids)) + self.positions(places)
        return self.dropout(self.norm(total))


class Attention(nn.Module):
    """Attention with separate query, key and value products, and its normalised residual."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_dropout = nn.Dropout(sizes.dropout)  # never called; searches for dropout modules find p here
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)
        self.output = nn.Linear(sizes.width, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.norm = norm(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.attention_dropout.p if self.training else 0.0
        mixed = attend(self.query(x), self.key(x), self.value(x), heads=self.heads, dropout=dropout)
        return self.norm(x + self.dropout(self.output(mixed)))


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, and their normalised residual."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(sizes.width, sizes.hidden),
            nn.GELU(),
            nn.Linear(sizes.hidden, sizes.width),
            nn.Dropout(sizes.dropout),
        )
        self.norm = norm(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layers(x))


class Bert(nn.Module):
    """Embeddings, a post-norm encoder, a tanh pooler over the first token, and a classifier."""

    def __init__(self, sizes: BertSizes = BASE) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes)
        blocks = [nn.Sequential(Attention(sizes), FeedForward(sizes)) for _ in range(sizes.layers)]
        self.encoder = nn.Sequential(*blocks)
        self.pooler = nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.Tanh())
        self.dropout = nn.Dropout(sizes.dropout)
        self.classifier = nn.Linear(sizes.width, sizes.labels)
        self.apply(_initialise)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [batch, seq] -> logits [batch, labels]."""
        encoded = self.encoder(self.embeddings(input_ids))
        return self.classifier(self.dropout(self.pooler(encoded[:, 0])))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def _tokens(sizes: BertSizes, *, batch: int, seq: int) -> Tokens:
    return Tokens(batch=batch, seq=seq, max_seq=sizes.max_seq, vocabulary=sizes.vocabulary, classes=sizes.labels)


TINY_RECIPE = Recipe(model=partial(Bert, TINY), data=_tokens(TINY, batch=4, seq=32))
BASE_ENTRY = ZooModel(
    name="bert_base",
    meaning="BERT-base for sequence classification: a post-norm encoder with separate query, key and value products",
    base=Recipe(model=Bert, data=_tokens(BASE, batch=16, seq=128), learning_rate=TRANSFORMER_LEARNING_RATE),
    tiny=TINY_RECIPE,
)
LARGE_ENTRY = ZooModel(
    name="bert_large",
    meaning="BERT-large: the same encoder, twice as deep and a third wider, which fills a GPU",
    base=Recipe(
        model=partial(Bert, LARGE), data=_tokens(LARGE, batch=16, seq=128), learning_rate=TRANSFORMER_LEARNING_RATE
    ),
    tiny=TINY_RECIPE,
)
