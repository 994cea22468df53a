"""A multilayer perceptron that classifies images."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from tuner.zoo.recipe import Images, Recipe, ZooModel


class MLP(nn.Module):
    """Flatten, then linear layers with ReLU between them: widths[0] inputs, widths[-1] classes."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths[:-1]):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))

    def forward(self, images: Tensor) -> Tensor:
        """[batch, ...] -> logits [batch, classes]."""
        return self.layers(images)


ENTRY = ZooModel(
    name="mlp",
    meaning="multilayer perceptron 784-512-256-10: a step made of launches, with hardly any work in them",
    base=Recipe(
        model=partial(MLP, (784, 512, 256, 10)),
        data=Images(batch=64, channels=1, side=28, classes=10),
    ),
    tiny=Recipe(
        model=partial(MLP, (784, 64, 32, 10)),
        data=Images(batch=16, channels=1, side=28, classes=10),
    ),
)
