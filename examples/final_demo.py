"""Everything in one loop that stays as it is: mixed precision, fused kernels, graphs on several streams.

python examples/final_demo.py                          trains by options chosen by hand
python examples/final_demo.py --plan plan.json         by a plan that `kitsune tune` has measured
python examples/final_demo.py --profile                measures what it came to, and writes profile.json
"""

import argparse

import torch
from torch import nn
from train_cnn import batches, make_model

import kitsune

BY_HAND = {"enable_amp": True, "enable_fusion": True, "num_streams": 4, "memory_pool_size": "2GB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plan", help="JSON file of a plan")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="profile.json", help="where --profile writes to")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = make_model().to(device)
    chosen = {"plan": kitsune.Plan.load(options.plan)} if options.plan else BY_HAND
    optimizer = kitsune.KitsuneOptimizer(
        torch.optim.AdamW, model.parameters(), lr=3e-3, profile=options.profile, **chosen
    )
    for number, (images, labels) in enumerate(batches(options.steps, device), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % 10 == 0 or number == options.steps:
            print(f"step {number:4d}  loss {loss.item():.4f}")
    optimizer.print_summary()
    if options.profile:
        optimizer.save_profile(options.out)
        print(f"\nThe raw samples are in {options.out}")


if __name__ == "__main__":
    main()
