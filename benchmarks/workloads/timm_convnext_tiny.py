"""timm's ConvNeXt-T, 64 images of 224 x 224."""

import timm
import torch

from kitsune import Workload


def make_workload() -> Workload:
    model = timm.create_model("convnext_tiny").train()
    batch = torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, batch)
