"""Branches of a model on several CUDA streams: recorded, scheduled, captured and proven, all in TrainStep.

python examples/stream_parallelism.py                  prints what was planned; without a GPU, why nothing was
python examples/stream_parallelism.py --trace step.json      writes it for https://ui.perfetto.dev as well
"""

import argparse

import torch
from torch import Tensor, nn
from train_cnn import ANGLES, batches

import kitsune
from kitsune.errors import UnplannedError

BRANCHES = 4


class Branches(nn.Module):
    """Blocks of branches that do not need each other, as in GoogLeNet."""

    def __init__(self, blocks: int = 3, width: int = 12) -> None:
        super().__init__()
        sizes = [1, *[BRANCHES * width] * blocks]
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Conv2d(size, width, kernel, padding=kernel // 2), nn.BatchNorm2d(width), nn.ReLU())
                for kernel in (1, 3, 5, 7)
            )
            for size in sizes[:-1]
        )
        self.head = nn.Linear(sizes[-1], ANGLES)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, side, side] -> logits [batch, angles]."""
        hidden = images
        for block in self.blocks:
            hidden = torch.cat([branch(hidden) for branch in block], 1)
        return self.head(hidden.mean((2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--streams", type=int, default=4, choices=range(1, 9))
    parser.add_argument("--trace", help="file for the planned launches")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Branches().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = kitsune.Plan.by_hand(capture="step", streams=options.streams)
    step = kitsune.TrainStep(model, nn.functional.cross_entropy, optimizer, plan=plan)
    for number, (images, labels) in enumerate(batches(options.steps, device), start=1):
        loss = step(images, labels)
        if number % 10 == 0 or number == options.steps:
            print(f"step {number:4d}  loss {loss.item():.4f}")
    print(f"\n{step.report}")
    if options.trace:
        try:
            step.report.trace(options.trace)
        except UnplannedError as error:
            print(f"\nno trace: {error}")


if __name__ == "__main__":
    main()
