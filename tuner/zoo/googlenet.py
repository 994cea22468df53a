"""GoogLeNet (Szegedy et al. 2014) with batch normalisation and without auxiliary heads.

As in torchvision, the "5x5" branch of every Inception block is a 3x3 convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tuner.zoo.recipe import Images, Recipe, ZooModel


@dataclass(frozen=True, slots=True)
class Branches:
    """Output channels inside one Inception block."""

    point: int  #: 1x1
    middle_reduced: int  #: 1x1 before the first 3x3
    middle: int
    wide_reduced: int  #: 1x1 before the second 3x3
    wide: int
    pooled: int  #: 1x1 after the pooling

    @property
    def total(self) -> int:
        return self.point + self.middle + self.wide + self.pooled

    def divided_by(self, divisor: int) -> "Branches":
        sizes = (self.point, self.middle_reduced, self.middle, self.wide_reduced, self.wide, self.pooled)
        return Branches(*(max(size // divisor, 2) for size in sizes))


STAGES = (
    (Branches(64, 96, 128, 16, 32, 32), Branches(128, 128, 192, 32, 96, 64)),
    (
        Branches(192, 96, 208, 16, 48, 64),
        Branches(160, 112, 224, 24, 64, 64),
        Branches(128, 128, 256, 24, 64, 64),
        Branches(112, 144, 288, 32, 64, 64),
        Branches(256, 160, 320, 32, 128, 128),
    ),
    (Branches(256, 160, 320, 32, 128, 128), Branches(384, 192, 384, 48, 128, 128)),
)
TINY_STAGES = tuple((stage[0].divided_by(8),) for stage in STAGES)


def unit(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU."""
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(fan_out, eps=1e-3),
        nn.ReLU(inplace=True),
    )


def half() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


class Inception(nn.Module):
    """Four independent branches over the same input, concatenated along the channels."""

    def __init__(self, fan_in: int, branches: Branches) -> None:
        super().__init__()
        self.point = unit(fan_in, branches.point, 1)
        self.middle = nn.Sequential(
            unit(fan_in, branches.middle_reduced, 1), unit(branches.middle_reduced, branches.middle, 3)
        )
        self.wide = nn.Sequential(unit(fan_in, branches.wide_reduced, 1), unit(branches.wide_reduced, branches.wide, 3))
        self.pooled = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), unit(fan_in, branches.pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.point(x), self.middle(x), self.wide(x), self.pooled(x)), dim=1)


class GoogLeNet(nn.Module):
    """A convolutional stem, three stages of Inception blocks with pooling between them, and a linear head."""

    def __init__(
        self,
        width: int = 64,
        stages: Sequence[Sequence[Branches]] = STAGES,
        classes: int = 1000,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            unit(3, width, 7, 2), half(), unit(width, width, 1), unit(width, 3 * width, 3), half()
        )
        fan_in = 3 * width
        blocks: list[nn.Module] = []
        for index, stage in enumerate(stages):
            if index == 1:
                blocks.append(half())
            elif index == 2:
                blocks.append(nn.MaxPool2d(2, stride=2, ceil_mode=True))
            for branches in stage:
                blocks.append(Inception(fan_in, branches))
                fan_in = branches.total
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(fan_in, classes)
        )
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, height, width] -> logits [batch, classes]."""
        return self.head(self.stages(self.stem(images)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


ENTRY = ZooModel(
    name="googlenet",
    meaning="GoogLeNet on 224x224 images: four independent branches in every block, work for several streams",
    base=Recipe(model=GoogLeNet, data=Images(batch=16, channels=3, side=224, classes=1000)),
    tiny=Recipe(
        model=partial(GoogLeNet, width=8, stages=TINY_STAGES, classes=10),
        data=Images(batch=8, channels=3, side=64, classes=10),
    ),
)
