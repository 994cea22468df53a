"""Fused kernels: FusionEngine puts them into a block of layers and says what each is worth; and in a training loop the
compiler makes few kernels of many operations, and the loop measures what that came to.

python examples/kernel_fusion.py --steps 60
"""

import argparse

import torch
from torch import Tensor, nn
from train_cnn import batches, make_model

from kitsune import KitsuneOptimizer, fusion
from kitsune.errors import UnfitError

ROWS = {"cuda": 8192, "cpu": 64}
WIDTH = 512


class Block(nn.Module):
    """The half of a transformer's layer that is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x), approximate="tanh")))


def fuse_block(device: str) -> None:
    block, x = Block().to(device), torch.randn(ROWS[device], WIDTH, device=device)
    try:
        engine = fusion.FusionEngine()
    except UnfitError as error:  # a CPU build of torch brings no Triton along
        print(error)
        return
    fused = engine.fuse(block)
    y = fused(x)
    y.square().mean().backward()
    stats = engine.get_fusion_stats()
    print(f"fusion {stats}")
    for one in stats.kept:
        if one.benefit is not None:
            times = f"{one.benefit.original_ms:.3f} ms became {one.benefit.fused_ms:.3f}"
            print(f"{one.pattern}: {one.operations} operations, {one.benefit.ratio:.2f} times as fast, {times}")
    for other in stats.refused:
        print(f"{other.pattern} stays: {other.reason}")
    if stats.launches_before is not None:
        print(f"kernels launched, forward and backward: {stats.launches_before} as given, {stats.launches_after} fused")
    for note in stats.notes:
        print(note)
    print(f"the result differs by {(y - block(x)).abs().max().item():.1e} at most")


def train(steps: int, device: str) -> None:
    model = make_model().to(device)
    optimizer = KitsuneOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        enable_fusion=True,
        fusion_config=fusion.FusionConfig(max_fusion_size=32),
        profile=True,
    )
    for number, (images, labels) in enumerate(batches(steps, device), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % 10 == 0 or number == steps:
            print(f"step {number:4d}  loss {loss.item():.4f}")
    optimizer.print_summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    fuse_block(device)
    train(options.steps, device)


if __name__ == "__main__":
    main()
