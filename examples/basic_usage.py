"""The least that a loop needs: wrap the optimizer, and train as before.

python examples/basic_usage.py
"""

import argparse

import torch
from torch import nn
from train_cnn import batches, make_model

import kitsune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, criterion = make_model().to(device), nn.CrossEntropyLoss()
    optimizer = kitsune.KitsuneOptimizer(torch.optim.AdamW, model.parameters(), lr=3e-3)
    for number, (images, labels) in enumerate(batches(options.steps, device), start=1):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % 10 == 0 or number == options.steps:
            print(f"step {number:4d}  loss {loss.item():.4f}")
    print(f"\n{optimizer.report}")


if __name__ == "__main__":
    main()
