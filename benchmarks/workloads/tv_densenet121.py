"""torchvision's DenseNet-121 in fp32, 16 images of 128 x 128.

Built after https://github.com/pytorch/pytorch/issues/161764. There, in the way of torch.compile's tutorial, a step with
mode="max-autotune" took twice the time of eager.
"""

import torch
import torchvision

from kitsune import Workload


def make_workload() -> Workload:
    model = torchvision.models.densenet121().train()
    batch = torch.randn(16, 3, 128, 128), torch.randint(0, 1000, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, torch.nn.functional.cross_entropy, optimizer, batch)
