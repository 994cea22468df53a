"""Recipes of zoo models: build a Workload with random weights and data of a given batch size.

The example batch is noise, for timing. `batches` is a stream of synthetic data that a model can learn.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitsune.workload import Workload, move_batch
from tuner.zoo import streams

Size = Literal["base", "tiny"]
SIZES: Final[tuple[Size, ...]] = ("base", "tiny")
MAX_BATCH: Final = 65536

CNN_LEARNING_RATE: Final = 1e-3
TRANSFORMER_LEARNING_RATE: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Random data of a batch size."""

    batch: int

    @property
    def limits(self) -> Mapping[str, int]:
        """What a user may choose, and the largest value of it."""
        return {"batch": MAX_BATCH}

    def resized(self, chosen: Mapping[str, int]) -> Self:
        return replace(self, **chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images(Samples):
    """Random images float32 [batch, channels, side, side] with labels int64 [batch]."""

    channels: int
    side: int
    classes: int

    def draw(self) -> tuple[Tensor, Tensor]:
        images = torch.randn(self.batch, self.channels, self.side, self.side)
        return images, torch.randint(self.classes, (self.batch,))

    def stream(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches of images of a few classes; each class has a pattern, with noise added."""
        return streams.images(self.batch, self.channels, self.side, self.classes, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Samples):
    """Random token ids int64 [batch, seq] with labels int64 [batch], or with the next tokens [batch, seq].

    `classes=None` asks for the next tokens. Ids start at 1, since 0 is the padding of BERT's vocabulary.
    """

    seq: int
    max_seq: int
    vocabulary: int
    classes: int | None

    @property
    def limits(self) -> Mapping[str, int]:
        return {"batch": MAX_BATCH, "seq": self.max_seq}

    def draw(self) -> tuple[Tensor, Tensor]:
        text = torch.randint(1, self.vocabulary, (self.batch, self.seq + 1))
        ids = text[:, :-1].contiguous()
        if self.classes is None:
            return ids, text[:, 1:].contiguous()
        return ids, torch.randint(self.classes, (self.batch,))

    def stream(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches of text. The next token mostly depends on the last one, or each class has its own words."""
        if self.classes is None:
            return streams.text(self.batch, self.seq, self.vocabulary, seed)
        return streams.topics(self.batch, self.seq, self.vocabulary, self.classes, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clicks(Samples):
    """Random dense features float32 [batch, dense] and, for each table, ids int64 [batch]; labels 0 or 1 as float32.

    Each table has an ids tensor of its own: an archive stores the value range of a tensor, and tables differ in rows.
    """

    dense: int
    rows: tuple[int, ...]

    def draw(self) -> tuple[tuple[Tensor, tuple[Tensor, ...]], Tensor]:
        dense = torch.randn(self.batch, self.dense)
        categories = tuple(torch.randint(rows, (self.batch,)) for rows in self.rows)
        return (dense, categories), torch.randint(2, (self.batch,)).float()

    def stream(self, seed: int) -> Iterator[tuple[tuple[Tensor, tuple[Tensor, ...]], Tensor]]:
        """Endless batches of clicks whose log-odds are a weighted sum of the features."""
        return streams.clicks(self.batch, self.dense, self.rows, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to build one size of one model: its data, loss and learning rate."""

    model: Callable[[], nn.Module]
    data: Images | Tokens | Clicks
    loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    learning_rate: float = CNN_LEARNING_RATE

    def resized(self, chosen: Mapping[str, int]) -> "Recipe":
        """A copy with another batch or seq; the names must be among `data.limits`."""
        return replace(self, data=self.data.resized(chosen))

    def build(self, device: torch.device | str = "cpu") -> Workload:
        """A model in train mode, AdamW and a batch, all on the device.

        Everything is drawn on the CPU from torch's global generator, so that one seed gives the same weights and the
        same data on every device. Seed it first (`tuner.workloads.loader.load_workload` does).
        """
        model = self.model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        return Workload(model, self.loss_fn, optimizer, move_batch(self.data.draw(), device), self.data.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model of the zoo: `base` is the published size, `tiny` the same architecture for tests on a CPU."""

    name: str
    meaning: str
    base: Recipe
    tiny: Recipe

    def recipe(self, size: Size) -> Recipe:
        return self.tiny if size == "tiny" else self.base


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits [batch, seq, vocabulary] against token ids [batch, seq], mean over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
