"""Mixed precision twice: by the optimizer alone, and by hand with torch's autocast and a scaler that counts.

python examples/amp_integration.py                     bfloat16, or float16 where the GPU has no other
python examples/amp_integration.py --dtype float16
"""

import argparse

import torch
from torch import nn
from train_cnn import batches, make_model

from kitsune import KitsuneOptimizer
from kitsune.amp import AMPConfig, GradScaler, ScalerStatistics, autocast

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def by_the_optimizer(config: AMPConfig, steps: int, device: str) -> tuple[float, ScalerStatistics | None]:
    """The last loss, and what its own scaler did where there is one. The loop stays as it is, and needs none."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = KitsuneOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), enable_amp=True, amp_config=config, capture_graph=False
    )
    loss = torch.zeros(())
    for images, labels in batches(steps, device):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item(), optimizer.report.scaler


def by_hand(config: AMPConfig, steps: int, device: str) -> tuple[float, GradScaler]:
    """The last loss, and the scaler."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(device, config=config)
    loss = torch.zeros(())
    for images, labels in batches(steps, device):
        optimizer.zero_grad()
        with autocast(config, device_type=device):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item(), scaler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=DTYPES)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AMPConfig(dtype=DTYPES.get(options.dtype or ""))
    loss, statistics = by_the_optimizer(config, options.steps, device)
    print(f"by the optimizer: loss {loss:.4f}, {statistics or 'no scaling'}")
    loss, scaler = by_hand(config, options.steps, device)
    print(f"by hand:          loss {loss:.4f}, {scaler.statistics}")


if __name__ == "__main__":
    main()
