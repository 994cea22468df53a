"""Fused kernels: the compiler makes few kernels of many operations, and the loop measures what that came to.

python examples/kernel_fusion.py --steps 60
"""

import argparse

import torch
from torch import nn
from train_cnn import batches, make_model

from kitsune import KitsuneOptimizer
from kitsune.fusion import FusionConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = KitsuneOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        enable_fusion=True,
        fusion_config=FusionConfig(max_fusion_size=32),
        profile=True,
    )
    for number, (images, labels) in enumerate(batches(options.steps, device), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % 10 == 0 or number == options.steps:
            print(f"step {number:4d}  loss {loss.item():.4f}")
    optimizer.print_summary()


if __name__ == "__main__":
    main()
