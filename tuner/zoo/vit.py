"""ViT-B/16 (Dosovitskiy et al. 2020) in torchvision's sizes, for image classification."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tuner.zoo.attention import SelfAttention
from tuner.zoo.recipe import TRANSFORMER_LEARNING_RATE, Images, Recipe, ZooModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTSizes:
    """The defaults are ViT-B/16 on ImageNet."""

    side: int = 224
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    classes: int = 1000


BASE = ViTSizes()
TINY = ViTSizes(side=32, patch=8, width=64, layers=2, heads=4, hidden=128, classes=10)


def norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, sizes: ViTSizes) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            norm(sizes.width), SelfAttention(sizes.width, sizes.heads, dropout=0.0, causal=False)
        )
        self.feed_forward = nn.Sequential(
            norm(sizes.width),
            nn.Linear(sizes.width, sizes.hidden),
            nn.GELU(),
            nn.Linear(sizes.hidden, sizes.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class ViT(nn.Module):
    """Patches as tokens behind a class token, a pre-norm encoder, and a linear head on the class token."""

    def __init__(self, sizes: ViTSizes = BASE) -> None:
        super().__init__()
        tokens = (sizes.side // sizes.patch) ** 2 + 1
        self.patches = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
        self.positions = nn.Parameter(torch.empty(1, tokens, sizes.width))
        self.encoder = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)), norm(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.classes)
        self.apply(_initialise)
        nn.init.normal_(self.positions, std=0.02)
        # In the paper the head starts at zero; then no gradient would reach the encoder in the first step.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, side, side] -> logits [batch, classes]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(patches.shape[0], -1, -1)
        encoded = self.encoder(torch.cat((first, patches), dim=1) + self.positions)
        return self.head(encoded[:, 0])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        fan_in = module.in_channels * math.prod(module.kernel_size)
        nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / fan_in))
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


ENTRY = ZooModel(
    name="vit_b16",
    meaning="ViT-B/16 on 224x224 images: large matrix products, a step that fills the GPU",
    base=Recipe(
        model=ViT,
        data=Images(batch=64, channels=3, side=BASE.side, classes=BASE.classes),
        learning_rate=TRANSFORMER_LEARNING_RATE,
    ),
    tiny=Recipe(model=partial(ViT, TINY), data=Images(batch=8, channels=3, side=TINY.side, classes=TINY.classes)),
)
