"""An efficiently updatable network for chess (NNUE), a batch of 16384 positions; small and large.

Built after https://github.com/official-stockfish/nnue-pytorch/pull/325. There torch.compile's backend `cudagraphs`
raised the small net's rate from 212 to 251 steps a second, and lowered the large one's from 84.6 to 59.2: so it became
an option. The nets are of that kind: features by the place of the king, a wide first layer, eight narrow stacks. The
features here are drawn at random, 32 a side, without those that nnue-pytorch shares between kings.
"""

import torch
from torch import nn

from kitsune import Workload

FEATURES = 32 * 11 * 64  # places of the king, kinds of pieces, squares
ACTIVE, STACKS = 32, 8
HIDDEN = (15, 32)


class NNUE(nn.Module):
    """us fp32 [batch, 1] (1 for white), white and black int64 [batch, 32] (features), stack int64 [batch] -> the
    score as fp32 [batch, 1]."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.width = width
        self.accumulator = nn.EmbeddingBag(features, width + STACKS, mode="sum")
        self.bias = nn.Parameter(torch.zeros(width + STACKS))
        first, second = HIDDEN
        self.first = nn.Linear(width, STACKS * (first + 1))
        self.second = nn.Linear(2 * first, STACKS * second)
        self.third = nn.Linear(second, STACKS)
        nn.init.normal_(self.accumulator.weight, std=0.02)

    def forward(self, us: torch.Tensor, white: torch.Tensor, black: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        sides = [self.accumulator(side) + self.bias for side in (white, black)]
        (one, one_psqt), (two, two_psqt) = (side.split((self.width, STACKS), 1) for side in sides)
        hidden = us * torch.cat([one, two], 1) + (1 - us) * torch.cat([two, one], 1)
        left, right, other_left, other_right = hidden.clamp(0, 1).chunk(4, 1)
        hidden = torch.cat([left * right, other_left * other_right], 1)
        part, direct = chosen(self.first(hidden), stack).split((HIDDEN[0], 1), 1)
        part = torch.cat([part.square(), part], 1).clamp(0, 1)
        part = chosen(self.second(part), stack).clamp(0, 1)
        psqt = (one_psqt - two_psqt).gather(1, stack[:, None]) * (us - 0.5)
        return chosen(self.third(part), stack) + direct + psqt


def chosen(outputs: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    """[batch, stacks * n] -> [batch, n]: each position's own stack."""
    outputs = outputs.unflatten(1, (STACKS, -1))
    return outputs.gather(1, stack[:, None, None].expand(-1, 1, outputs.size(2))).squeeze(1)


def loss_fn(score: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """result: the share of a win, from 0 to 1, fp32 [batch, 1]."""
    return (score.sigmoid() - result).abs().pow(2.5).mean()


def workload_of(width: int, *, batch: int = 16384, features: int = FEATURES) -> Workload:
    model = NNUE(width, features).train()
    white, black = torch.randint(0, features, (2, batch, ACTIVE))
    x = (torch.randint(0, 2, (batch, 1)).float(), white, black, torch.randint(0, STACKS, (batch,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, loss_fn, optimizer, (x, torch.rand(batch, 1)))


def make_small() -> Workload:
    return workload_of(128)


def make_large() -> Workload:
    return workload_of(3072)
