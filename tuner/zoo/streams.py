"""Endless streams of synthetic batches that models can learn, on the CPU.

The rule to learn is the same for every seed; the seed only draws the samples, so another seed gives held-out data.
Models learn each rule within a few hundred steps, since there are few classes, words and table rows.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

#: Seed of the rule to learn.
WORLD_SEED: Final = 20_261_126
MOST_CLASSES: Final = 10
#: A pattern has so many points per side, whatever the size of the image.
POINTS: Final = 7
WORDS: Final = 32
ROWS: Final = 16
#: Share of tokens that follow the rule: the successor of the last token, or a word of the class. Others are random.
TOLD: Final = 0.8


def images(batch: int, channels: int, side: int, classes: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(float32 [batch, channels, side, side], labels int64 [batch])."""
    classes = min(classes, MOST_CLASSES)
    patterns = torch.randn(classes, channels, POINTS, POINTS, generator=_drawn(WORLD_SEED))
    places = torch.arange(side) * POINTS // side
    large = patterns[:, :, places][:, :, :, places]
    samples = _drawn(seed)
    while True:
        labels = torch.randint(classes, (batch,), generator=samples)
        yield 0.5 * large[labels] + torch.randn(batch, channels, side, side, generator=samples), labels


def text(batch: int, seq: int, vocabulary: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids int64 [batch, seq], the next ones [batch, seq])."""
    words = min(WORDS, vocabulary - 1)
    follows = torch.randperm(words, generator=_drawn(WORLD_SEED))
    samples = _drawn(seed)
    while True:
        told = torch.rand(batch, seq, generator=samples) < TOLD
        others = torch.randint(words, (batch, seq + 1), generator=samples)
        tokens = [others[:, 0]]
        for place in range(seq):
            tokens.append(torch.where(told[:, place], follows[tokens[-1]], others[:, place + 1]))
        ids = 1 + torch.stack(tokens, dim=1)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def topics(batch: int, seq: int, vocabulary: int, classes: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids int64 [batch, seq], labels int64 [batch])."""
    words = min(WORDS, (vocabulary - 1) // classes)
    samples = _drawn(seed)
    while True:
        labels = torch.randint(classes, (batch,), generator=samples)
        told = torch.rand(batch, seq, generator=samples) < TOLD
        own = labels[:, None] * words + torch.randint(words, (batch, seq), generator=samples)
        yield 1 + torch.where(told, own, torch.randint(classes * words, (batch, seq), generator=samples)), labels


def clicks(
    batch: int, dense: int, rows: Sequence[int], seed: int
) -> Iterator[tuple[tuple[Tensor, tuple[Tensor, ...]], Tensor]]:
    """((float32 [batch, dense], for each table ids int64 [batch]), labels 0 or 1 as float32 [batch])."""
    world, samples = _drawn(WORLD_SEED), _drawn(seed)
    weights = torch.randn(dense, generator=world)
    worth = [torch.randn(min(count, ROWS), generator=world) for count in rows]
    scale = (dense + len(rows)) ** -0.5
    while True:
        features = torch.randn(batch, dense, generator=samples)
        ids = tuple(torch.randint(len(each), (batch,), generator=samples) for each in worth)
        odds = features @ weights + sum(each[own] for each, own in zip(worth, ids, strict=True))
        labels = torch.rand(batch, generator=samples) < torch.sigmoid(3 * scale * odds)
        yield (features, ids), labels.float()


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
