"""Training steps by name, small enough to export in about a second each."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.submission.exporting.export import to_archive
from kitsune.submission.format.archive import Archive
from kitsune.workload import Workload
from tests.unit.kitsune.submission import layers


def some_images(size: int, channels: int = 3, batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def some_labels(batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 5, (batch,))


def some_ids(batch: int = 4, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 50, (batch, length))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def next_token(logits, ids):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def mlp(batch: int = 4, width: int = 16, p: float = 0.1) -> Workload:
    model = layers.MLP(width, p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(
        model, nn.CrossEntropyLoss(weight=torch.rand(5)), optimizer, (torch.randn(batch, 12), some_labels(batch))
    )


def lenet(batch: int = 4) -> Workload:
    model = layers.LeNet()
    return Workload(model, F.cross_entropy, adamw(model), (some_images(28, 1, batch), some_labels(batch)))


def resnet(batch: int = 4) -> Workload:
    model = layers.ResNet()
    return Workload(model, F.cross_entropy, adamw(model), (some_images(16, 3, batch), some_labels(batch)))


def resnet_channels_last() -> Workload:
    model = layers.ResNet().to(memory_format=torch.channels_last)
    x = some_images(16).contiguous(memory_format=torch.channels_last)
    return Workload(model, F.cross_entropy, adamw(model), (x, some_labels()))


def inception() -> Workload:
    model = layers.Inception()

    def loss(out, y):
        return F.cross_entropy(out["logits"], y) + 0.3 * F.cross_entropy(out["aux"], y)

    return Workload(model, loss, adamw(model), (some_images(12), some_labels()))


def llama(batch: int = 4) -> Workload:
    model = layers.Llama()
    ids = some_ids(batch)
    return Workload(model, next_token, adamw(model), (ids, ids))


def vit() -> Workload:
    model = layers.ViT()
    return Workload(model, F.cross_entropy, adamw(model), (some_images(16), some_labels()))


def lstm() -> Workload:
    model = layers.LSTM()
    return Workload(model, F.cross_entropy, torch.optim.RMSprop(model.parameters()), (some_ids(), some_labels()))


def encoder() -> Workload:
    model = layers.Encoder()
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[2:, 4:] = True
    return Workload(model, F.cross_entropy, adamw(model), ((torch.randn(4, 6, 16), padding), some_labels()))


def causal() -> Workload:
    model = layers.Causal()
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return Workload(model, F.cross_entropy, adamw(model), ((torch.randn(4, 6, 16), mask), some_labels()))


def translator() -> Workload:
    model = layers.Translator()
    band = torch.zeros(6, 6)
    band[0, 3:] = float("-inf")
    x = (torch.randn(4, 6, 16), torch.randn(4, 6, 16), band, nn.Transformer.generate_square_subsequent_mask(6))
    return Workload(model, F.cross_entropy, adamw(model), (x, some_labels()))


def graph() -> Workload:
    model = layers.GraphNetwork()
    edges = torch.randint(0, 10, (2, 30))
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3])
    return Workload(model, F.cross_entropy, adamw(model), ((torch.randn(10, 8), edges, groups), some_labels()))


def towers() -> Workload:
    model = layers.TwoTowers()
    x = {"features": {"left": torch.randn(4, 6), "right": [torch.randn(4, 4)]}, "scale": torch.rand(4, 1), "flip": True}
    y = {"target": torch.randn(4, 8), "weight": torch.rand(4)}

    def loss(out, y):
        return ((out - y["target"]).pow(2).sum(1) * y["weight"]).sum() / out.shape[0]

    decay = {"params": [model.left.weight, model.right.weight], "weight_decay": 0.1}
    rest = {"params": [model.left.bias, model.right.bias, model.scale], "weight_decay": 0.0}
    return Workload(model, loss, torch.optim.Adam([decay, rest], lr=1e-3, amsgrad=True), (x, y))


def mixed() -> Workload:
    model = layers.Mixed()

    def loss(out, y):
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        return F.mse_loss(out, y) + 1e-3 * penalty

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Workload(model, loss, torch.optim.Adagrad(trained), (torch.randn(4, 8), torch.randn(4, 8)))


def own_loss() -> Workload:
    model = layers.OwnLoss()
    return Workload(model, None, torch.optim.NAdam(model.parameters()), ((torch.randn(4, 12), some_labels()), None))


def frozen_norms() -> Workload:
    model = layers.ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Workload(model, F.cross_entropy, torch.optim.SGD(trained), (some_images(16), some_labels()))


def fixed_batch() -> Workload:
    model = layers.FixedBatch()
    return Workload(model, F.cross_entropy, torch.optim.SGD(model.parameters()), (torch.randn(8, 12), some_labels(8)))


def double() -> Workload:
    model = layers.MLP().double()
    loss = nn.CrossEntropyLoss()
    return Workload(model, loss, adamw(model), (torch.randn(4, 12, dtype=torch.float64), some_labels()))


STEPS: dict[str, Callable[[], Workload]] = {
    step.__name__: step
    for step in (
        mlp, lenet, resnet, resnet_channels_last, inception, llama, vit, lstm, encoder, causal, translator,
        graph, towers, mixed, own_loss, frozen_norms, fixed_batch, double,
    )
}  # fmt: skip
FIXED = frozenset(("fixed_batch",))
"""Those whose batch size cannot vary."""
DEAR = frozenset(("causal", "encoder", "gpt2", "t5", "translator", "vit"))
"""Those that take 2 to 6 s to export, and of whose kind there are others: transformers."""


def named() -> list[Any]:
    """All steps, as the parameters of a test."""
    return [pytest.param(name, marks=[pytest.mark.minutes] * (name in DEAR)) for name in STEPS]


def make(name: str, seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    return STEPS[name]()


@functools.cache
def archive_of(name: str) -> Archive:
    """The archive of a step, exported once in a test process."""
    return to_archive(make(name))
