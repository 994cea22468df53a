"""Switches dropout off while numbers are compared, since compiled code draws other masks than eager code."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

DROPOUTS: tuple[tuple[Any, str], ...] = (
    (F, "dropout"),
    (F, "dropout1d"),
    (F, "dropout2d"),
    (F, "dropout3d"),
    (F, "alpha_dropout"),
    (F, "feature_alpha_dropout"),
    (torch, "dropout"),
    (torch, "alpha_dropout"),
    (torch, "feature_dropout"),
    (torch, "feature_alpha_dropout"),
)
_attention = F.scaled_dot_product_attention


@contextlib.contextmanager
def dropout_off() -> Iterator[None]:
    """Replaces every dropout function of torch by the identity, in plain Python that torch.compile can trace.

    Functions imported by name (`from torch.nn.functional import dropout`) are not replaced. `disable_dropout` covers
    dropout modules, and a caller can check whether the generator has still moved.
    """
    patches: list[tuple[Any, str, Any]] = [(*place, _identity) for place in DROPOUTS]
    patches.append((F, "scaled_dot_product_attention", _attention_without_dropout))
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, replacement in patches:
            setattr(module, name, replacement)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def disable_dropout(model: torch.nn.Module) -> None:
    """Sets the probability of the model's dropout modules to 0, for good."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, torch.nn.MultiheadAttention | torch.nn.RNNBase):
            module.dropout = 0.0


def _identity(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:  # noqa: A002 - the name users may pass
    return input


def _attention_without_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - ignored on purpose
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    return _attention(query, key, value, attn_mask, 0.0, *rest, **options)
