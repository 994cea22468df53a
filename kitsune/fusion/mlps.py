"""Patterns of the block of a transformer between two residuals: two linear layers, or three with a gate."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.elementwise import activation_of, best_of
from kitsune.fusion.layers import layer_at
from kitsune.fusion.match import Found, Match
from kitsune.fusion.norms import factors
from kitsune.fusion.operations import behind, is_last, operation_of, value_of
from kitsune.kernels.gated_linear import is_offered as is_gated_offered
from kitsune.kernels.linear_activation import is_offered

OTHER_DTYPES = "its layers compute in different dtypes"
NOT_COMPUTED = "the kernel is not for its sizes and dtype on this device"


def mlp(node: Node) -> Found:
    """From the second layer. Dropout that drops nothing may come before it."""
    second = layer_at(node)
    if second is None:
        return None
    activated, idle = behind(second.x, is_idle_dropout)
    activation = activation_of(activated) if isinstance(activated, Node) else None
    if activation is None or isinstance(activation, str):
        return activation
    first = layer_at(activation.x)
    if first is None or first.is_transposed != second.is_transposed:
        return None
    dtype = value_of(node).dtype
    if value_of(activation.x).dtype != dtype:
        return OTHER_DTYPES
    given = (first.x, first.weight, first.bias, second.weight, second.bias)
    if not is_computed(partial(is_mlp_offered, is_transposed=first.is_transposed), given, dtype):
        return NOT_COMPUTED
    return Match(
        call=calls.mlp,
        arguments=(*given, activation.kind, dtype, first.is_transposed),
        results=(node,),
        inner=(*second.inner, *idle, activated, *activation.inner, activation.x, *first.inner),
        dtype=dtype,
    )


def is_mlp_offered(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *, is_transposed: bool) -> bool:
    return is_offered(x, w1.t(), b1, w2.t(), b2) if is_transposed else is_offered(x, w1, b1, w2, b2)


def gated_mlp(node: Node) -> Found:
    """From the last layer. Dropout that drops nothing may come before it."""
    last = operation_of(node)
    if last.name != "linear":
        return None
    product, idle = behind(last.get("x"), is_idle_dropout)
    found = (gated_layers(node, (*idle, product), *pair) for pair in factors(product))
    return best_of([one for one in found if one is not None])


def gated_layers(node: Node, inner: tuple[Node, ...], activated: Node, linear: Node) -> Found:
    """The layer `node` of the product, the last of `inner`, of the activated layer and the other one."""
    activation = activation_of(activated)
    if activation is None or isinstance(activation, str) or activation.x is linear:
        return activation if isinstance(activation, str) else None
    own = (*inner, activated, *activation.inner, activation.x, linear)
    chunk = chunk_of(activation.x, linear)
    if chunk is not None:
        return joined_layers(node, (*own, chunk), operation_of(chunk).get("x"), activation.kind)
    gate, up, down = (operation_of(one) for one in (activation.x, linear, node))
    if (gate.name, up.name) != ("linear", "linear") or gate.get("x") is not up.get("x"):
        return None
    if any(layer.get("bias") is not None for layer in (gate, up, down)):
        return "its layers have biases"
    dtype = value_of(node).dtype
    if any(value_of(one).dtype != dtype for one in (activation.x, linear)):
        return OTHER_DTYPES
    given = (gate.get("x"), *(layer.get("weight") for layer in (gate, up, down)))
    if not is_computed(is_gated_offered, given, dtype):
        return NOT_COMPUTED
    return Match(
        call=calls.gated_mlp,
        arguments=(*given, activation.kind, dtype),
        results=(node,),
        inner=own,
        dtype=dtype,
    )


def chunk_of(first: Any, second: Any) -> Node | None:
    """What has split the result of a layer into `first` and `second`, its halves; or None."""
    one, other = operation_of(first), operation_of(second)
    chunk = operation_of(one.get("x"))
    is_pair = one.name == other.name == "item" and one.get("x") is other.get("x")
    is_halved = chunk.name == "chunk" and chunk.get("chunks") == 2 and is_last(chunk.get("dim", 0), chunk.get("x"))
    if not is_pair or not is_halved or (one.get("index"), other.get("index")) != (0, 1):
        return None
    return one.get("x") if operation_of(chunk.get("x")).name == "linear" else None


def joined_layers(node: Node, inner: tuple[Node, ...], whole: Node, kind: str) -> Found:
    """The layer `node`, and `whole`, which computes gate and up; between them is `inner`."""
    layer, down = operation_of(whole), operation_of(node)
    if layer.get("bias") is not None or down.get("bias") is not None:
        return "its layers have biases"
    dtype = value_of(node).dtype
    if value_of(whole).dtype != dtype:
        return OTHER_DTYPES
    given = (layer.get("x"), layer.get("weight"), down.get("weight"))
    if value_of(whole).shape[-1] % 2 or not is_computed(is_joined_offered, given, dtype):
        return NOT_COMPUTED
    return Match(
        call=calls.joined_gated_mlp,
        arguments=(*given, kind, dtype),
        results=(node,),
        inner=(*inner, whole),
        dtype=dtype,
    )


def is_joined_offered(x: torch.Tensor, gate_and_up: torch.Tensor, down: torch.Tensor) -> bool:
    gate, up = gate_and_up.chunk(2)
    return is_gated_offered(x, gate, up, down)


def is_computed(is_offered: Callable[..., bool], given: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether the kernel computes it of these nodes in this dtype, by its own answer."""
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
