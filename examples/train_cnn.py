"""A small CNN that learns to tell the angle of a noisy grating: plain PyTorch, and the same step run by a plan.

python examples/train_cnn.py                              trains as written
kitsune tune examples/train_cnn.py:make_workload          measures how the step runs fastest on this machine
python examples/train_cnn.py --plan plan.json             trains by the plan that was kept
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import kitsune

ANGLES = 10
SIDE = 32
BATCH = 32


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, ANGLES),
    )


def batches(count: int, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    """Gratings float32 [batch, 1, side, side] under noise, and the index of their angle int64 [batch]."""
    across = torch.linspace(-math.pi, math.pi, SIDE)
    for _ in range(count):
        labels = torch.randint(ANGLES, (BATCH,))
        angle = (labels * (math.pi / ANGLES)).reshape(-1, 1, 1)
        phase = torch.rand(BATCH, 1, 1) * 2 * math.pi
        waves = torch.sin(4 * (angle.cos() * across + angle.sin() * across.reshape(-1, 1)) + phase)
        images = (waves + 0.5 * torch.randn(BATCH, SIDE, SIDE)).unsqueeze(1)
        yield images.to(device), labels.to(device)


def make_workload() -> kitsune.Workload:
    """What Kitsune tunes: the model, its loss, its optimizer and one batch of the shape that training sees."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return kitsune.Workload(model, nn.functional.cross_entropy, optimizer, next(batches(1)))


def train(steps: int, plan: kitsune.Plan | None = None, device: torch.device | str = "cpu") -> list[float]:
    """The loss of every step; without a plan an ordinary training loop."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    if plan is not None:
        step = kitsune.TrainStep(model, nn.functional.cross_entropy, optimizer, plan=plan)
        for x, y in batches(steps, device):
            losses.append(step(x, y).item())
        return losses
    for x, y in batches(steps, device):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="JSON file of a plan; without it the step runs as written")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    plan = kitsune.Plan.load(options.plan) if options.plan else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, loss in enumerate(train(options.steps, plan, device), start=1):
        if number % 10 == 0 or number == options.steps:
            print(f"step {number:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
