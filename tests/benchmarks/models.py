"""Models to time, each with the shape of a batch that fits it: they are those of the zoo."""

from torch import Tensor, nn

from tuner.zoo import ZOO


def create_mlp() -> nn.Module:
    """784-512-256-10, for images of 28 x 28."""
    return create("mlp")


def create_lenet5() -> nn.Module:
    """LeNet-5, for images of 28 x 28."""
    return create("lenet5")


def create_resnet18() -> nn.Module:
    """ResNet-18 as for CIFAR-10, for images of 3 x 32 x 32."""
    return create("resnet18")


def create(name: str) -> nn.Module:
    """A model of the zoo with random weights; `example_batch(size)` draws a batch for it."""
    recipe = ZOO[name].base
    model = recipe.model()

    def example_batch(size: int) -> tuple[Tensor, Tensor]:
        return recipe.data.resized({"batch": size}).draw()

    model.example_batch = example_batch  # type: ignore[assignment]
    return model


MODELS = {"mlp": create_mlp, "lenet5": create_lenet5, "resnet18": create_resnet18}
