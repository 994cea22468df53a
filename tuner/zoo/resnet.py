"""ResNet-18 for CIFAR and ResNet-50 for ImageNet (He et al. 2015)."""

from functools import partial

from torch import Tensor, nn

from tuner.zoo.recipe import Images, Recipe, ZooModel


def convolution(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False)


def shortcut(fan_in: int, fan_out: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 projection where the shape changes."""
    if stride == 1 and fan_in == fan_out:
        return nn.Identity()
    return nn.Sequential(convolution(fan_in, fan_out, 1, stride), nn.BatchNorm2d(fan_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(fan_in, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, width, 3),
            nn.BatchNorm2d(width),
        )
        self.shortcut = shortcut(fan_in, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the stride sits in the 3x3 (ResNet v1.5)."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        fan_out = width * self.expansion
        self.residual = nn.Sequential(
            convolution(fan_in, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, fan_out, 1),
            nn.BatchNorm2d(fan_out),
        )
        self.shortcut = shortcut(fan_in, fan_out, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


def cifar_stem(width: int) -> nn.Sequential:
    """A 3x3 convolution that keeps the resolution, for 32x32 images."""
    return nn.Sequential(convolution(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def imagenet_stem(width: int) -> nn.Sequential:
    """A 7x7 convolution and a pooling, which divide the resolution by four."""
    return nn.Sequential(
        convolution(3, width, 7, 2),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


class ResNet(nn.Module):
    """A stem, four stages of residual blocks of doubling width, and a linear head."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        stem: nn.Sequential,
        width: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        fan_in = width
        stages = []
        for index, count in enumerate(blocks):
            stage_width = width << index
            strides = [1 if index == 0 else 2] + [1] * (count - 1)
            for stride in strides:
                stages.append(block(fan_in, stage_width, stride))
                fan_in = stage_width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, classes))
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, height, width] -> logits [batch, classes]."""
        return self.head(self.stages(self.stem(images)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(width: int = 64, blocks: tuple[int, int, int, int] = (2, 2, 2, 2), classes: int = 10) -> ResNet:
    return ResNet(BasicBlock, blocks, cifar_stem(width), width, classes)


def resnet50(width: int = 64, blocks: tuple[int, int, int, int] = (3, 4, 6, 3), classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, blocks, imagenet_stem(width), width, classes)


RESNET18 = ZooModel(
    name="resnet18",
    meaning="ResNet-18 in its CIFAR form on 32x32 images: convolutions that fill a GPU only in part",
    base=Recipe(model=resnet18, data=Images(batch=128, channels=3, side=32, classes=10)),
    tiny=Recipe(
        model=partial(resnet18, width=8, blocks=(1, 1, 1, 1)),
        data=Images(batch=8, channels=3, side=16, classes=10),
    ),
)
RESNET50 = ZooModel(
    name="resnet50",
    meaning="ResNet-50 on 224x224 images: large convolutions, bound by the GPU itself",
    base=Recipe(model=resnet50, data=Images(batch=64, channels=3, side=224, classes=1000)),
    tiny=Recipe(
        model=partial(resnet50, width=8, blocks=(1, 2, 1, 1), classes=10),
        data=Images(batch=8, channels=3, side=64, classes=10),
    ),
)
