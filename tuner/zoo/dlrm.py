"""DLRM (Naumov et al. 2019) in its Criteo Kaggle configuration: predicts a click from dense and categorical features.

Sizes, layer order and initial weights are those of the authors' dlrm_s_pytorch.py with bench/dlrm_s_criteo_kaggle.sh.
Four things differ. A table has at most 10 000 rows (--max-ind-range there; Criteo's largest has 10 131 227), so that
AdamW on dense gradients of the tables does not dominate the step. A feature has one value, so an embedding bag is a
plain embedding. The final sigmoid is part of the loss. Biases start at zero, because for the head the authors' random
bias would be an arbitrary prior.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from tuner.zoo.recipe import Clicks, Recipe, ZooModel

#: Values of each categorical feature of the Criteo Kaggle data set, counted by the authors' preprocessing.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMSizes:
    """The defaults are those for Criteo Kaggle, except `most_rows`."""

    dense: int = 13
    most_rows: int = 10_000
    width: int = 16  #: of an embedding, and of the output of the bottom MLP
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each table."""
        return tuple(min(rows, self.most_rows) for rows in CRITEO_ROWS)


BASE = DLRMSizes()
TINY = DLRMSizes(most_rows=50, width=8, bottom=(32,), top=(32,))


def perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers, each followed by a ReLU."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers)


def products(vectors: Tensor) -> Tensor:
    """Dot product of each vector with each before it: [batch, n, width] -> [batch, n * (n - 1) / 2]."""
    count = vectors.shape[1]
    one, other = torch.tril_indices(count, count, offset=-1, device=vectors.device)
    return torch.bmm(vectors, vectors.transpose(1, 2))[:, one, other]


class DLRM(nn.Module):
    """A bottom MLP and an embedding table per categorical feature, all independent; their dot products; a top MLP."""

    def __init__(self, sizes: DLRMSizes = BASE) -> None:
        super().__init__()
        vectors = 1 + len(sizes.rows)
        self.bottom = perceptron((sizes.dense, *sizes.bottom, sizes.width))
        self.tables = nn.ModuleList(nn.Embedding(rows, sizes.width) for rows in sizes.rows)
        self.top = perceptron((sizes.width + math.comb(vectors, 2), *sizes.top))
        self.head = nn.Linear(sizes.top[-1], 1)
        self.apply(_initialise)

    def forward(self, dense: Tensor, categories: Sequence[Tensor]) -> Tensor:
        """float32 [batch, dense] and, for each table, int64 [batch] -> logits [batch]."""
        described = self.bottom(dense)
        looked_up = [table(ids) for table, ids in zip(self.tables, categories, strict=True)]
        met = products(torch.stack((described, *looked_up), dim=1))
        return self.head(self.top(torch.cat((described, met), dim=1))).squeeze(1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        reach = math.sqrt(1 / module.num_embeddings)
        nn.init.uniform_(module.weight, -reach, reach)


def _clicks(sizes: DLRMSizes, *, batch: int) -> Clicks:
    return Clicks(batch=batch, dense=sizes.dense, rows=sizes.rows)


ENTRY = ZooModel(
    name="dlrm",
    meaning="DLRM, a recommender: 26 embedding tables next to a bottom MLP, many small branches for several streams",
    base=Recipe(model=DLRM, data=_clicks(BASE, batch=2048), loss_fn=functional.binary_cross_entropy_with_logits),
    tiny=Recipe(
        model=partial(DLRM, TINY), data=_clicks(TINY, batch=32), loss_fn=functional.binary_cross_entropy_with_logits
    ),
)
