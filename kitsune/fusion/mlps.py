"""Pattern of the block of a transformer between two residuals: a linear layer, an activation, another linear layer."""

from typing import Any

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.elementwise import activation_of
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import behind, operation_of, value_of
from kitsune.kernels.linear_activation import is_offered


def mlp(node: Node) -> Found:
    """From the second layer. Dropout that drops nothing may come before it."""
    second = operation_of(node)
    if second.name != "linear":
        return None
    activated, idle = behind(second.get("x"), is_idle_dropout)
    activation = activation_of(activated) if isinstance(activated, Node) else None
    if activation is None or isinstance(activation, str):
        return activation
    layer = operation_of(activation.x)
    if layer.name != "linear":
        return None
    dtype = value_of(node).dtype
    if value_of(activation.x).dtype != dtype:
        return "its two layers compute in different dtypes"
    given = (*layer_of(layer), *layer_of(second)[1:])
    if not is_computed(given, dtype):
        return "the kernel is not for its sizes and dtype on this device"
    inner = (*idle, activated, *activation.inner, activation.x)
    return Match(call=calls.mlp, arguments=(*given, activation.kind, dtype), results=(node,), inner=inner, dtype=dtype)


def layer_of(layer: Any) -> tuple[Any, Any, Any]:
    """(x, weight, bias) of a linear layer."""
    return layer.get("x"), layer.get("weight"), layer.get("bias")


def is_computed(given: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether the kernel computes it of these nodes in this dtype."""
    try:
        return is_offered(*(cast(one, dtype) for one in given))
    except RuntimeError:  # nested tensors, and those of torch.func
        return False


def cast(node: Any, dtype: torch.dtype) -> Any:
    """A tensor without data for what autocast would make of it; None for no bias."""
    value = value_of(node)
    return None if value is None else value.new_empty(value.shape, dtype=dtype)


def is_idle_dropout(node: Any) -> bool:
    operation = operation_of(node)
    is_off = operation.get("training", True) is False or operation.get("p", 0.5) == 0
    return operation.name == "dropout" and is_off
