"""torchvision's ResNet-50, 64 images of 224 x 224."""

import torch
import torchvision

from kitsune import Workload


def make_workload() -> Workload:
    model = torchvision.models.resnet50().train()
    batch = torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, batch)
