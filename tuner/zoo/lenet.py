"""LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, for 28x28 images."""

from functools import partial

from torch import Tensor, nn

from tuner.zoo.recipe import Images, Recipe, ZooModel


class LeNet5(nn.Module):
    """Two 5x5 convolutions with pooling and three linear layers."""

    def __init__(
        self, channels: tuple[int, int] = (6, 16), features: tuple[int, int] = (120, 84), classes: int = 10
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels[0], 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels[0], channels[1], 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(channels[1] * 5 * 5, features[0]),
            nn.ReLU(),
            nn.Linear(features[0], features[1]),
            nn.ReLU(),
            nn.Linear(features[1], classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, 28, 28] -> logits [batch, classes]."""
        return self.classifier(self.features(images))


ENTRY = ZooModel(
    name="lenet5",
    meaning="LeNet-5 on 28x28 images: a small CNN, bound by launches",
    base=Recipe(model=LeNet5, data=Images(batch=64, channels=1, side=28, classes=10)),
    tiny=Recipe(
        model=partial(LeNet5, channels=(4, 8), features=(32, 16)),
        data=Images(batch=16, channels=1, side=28, classes=10),
    ),
)
