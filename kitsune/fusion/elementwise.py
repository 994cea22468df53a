"""Patterns of activations, dropout, batch norm and softmax. Each function takes the last node of a possible match."""

import math
from typing import Any, Final

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.gelus import Activation, written_gelu, written_quick_gelu
from kitsune.fusion.layers import results_from
from kitsune.fusion.match import Found, Match
from kitsune.fusion.norms import factors, is_sum
from kitsune.fusion.operations import behind, is_last, is_tensor, operation_of, value_of
from kitsune.fusion.writes import is_written
from kitsune.kernels.batch_norm_relu import batch_norm_relu as batch_norm_relu_kernel
from kitsune.kernels.bias_activation import KINDS
from kitsune.kernels.swiglu import swiglu as swiglu_kernel

GELUS: Final = {"none": "gelu", "tanh": "gelu_tanh"}


def linear_activation(node: Node) -> Found:
    activation = activation_of(node)
    if activation is None or isinstance(activation, str):
        return activation
    linear = activation.x
    layer = operation_of(linear)
    if layer.name != "linear" or layer.get("bias") is None:
        return None
    narrow = value_of(linear).dtype
    dtype = value_of(node).dtype if is_rounded(node, narrow) else narrow
    return Match(
        call=calls.linear_activation,
        arguments=(layer.get("x"), layer.get("weight"), layer.get("bias"), activation.kind, dtype),
        results=(node,),
        inner=(*activation.inner, linear),
        dtype=narrow,
    )


def activation_of(node: Node) -> Activation | str | None:
    operation = operation_of(node)
    kind = GELUS.get(operation.get("approximate", "none")) if operation.name == "gelu" else operation.name
    if kind is not None and kind in KINDS:
        return Activation(kind, operation.get("x"))
    return written_quick_gelu(node) or written_gelu(node)


def is_rounded(node: Node, dtype: torch.dtype) -> bool:
    """Whether all users round it to this dtype: autocast computes pow, and what follows from it, in fp32."""
    return all(result is not None and result.dtype == dtype for result in results_from(node))


def swiglu(node: Node) -> Found:
    found: list[Found] = []
    for activated, up in factors(node):
        operation = operation_of(activated)
        gate = operation.get("x")
        if operation.name == "silu" and value_of(gate).shape == value_of(up).shape:
            found.append(Match(call=swiglu_kernel, arguments=(gate, up), results=(node,), inner=(activated,)))
    return best_of(found)


def dropout_add(node: Node) -> Found:
    operation = operation_of(node)
    pair = operation.get("x"), operation.get("y")
    if operation.name != "add" or operation.get("alpha", 1) != 1 or not all(map(is_tensor, pair)):
        return None
    found: list[Found] = []
    for dropped, residual in (pair, pair[::-1]):
        dropout = operation_of(dropped)
        p = dropout.get("p", 0.5)
        if dropout.name != "dropout" or dropout.get("training", True) is not True or p == 0:
            continue
        if value_of(dropped).shape != value_of(residual).shape:
            found.append("the residual is broadcast")
            continue
        arguments = (dropout.get("x"), residual, p, value_of(node).dtype)
        found.append(Match(call=calls.added_dropout, arguments=arguments, results=(node,), inner=(dropped,)))
    return best_of(found)


def best_of(found: list[Found]) -> Found:
    """The first match whose inner nodes have no other users, else the first result, else None."""
    free = [one for one in found if isinstance(one, Match) and not one.shared]
    return next(iter([*free, *found]), None)


def batch_norm_relu(node: Node) -> Found:
    normed = operation_of(node).get("x")
    norm = operation_of(normed)
    if operation_of(node).name != "relu" or norm.name != "batch_norm":
        return None
    names = ("x", "weight", "bias", "mean", "variance")
    tensors = tuple(norm.get(name) for name in names)
    if tensors[1] is None or tensors[2] is None:
        return "the batch norm has no weight"
    settings = norm.get("training", False), norm.get("momentum", 0.1), norm.get("eps", 1e-5)
    statistics = tensors[3:] if settings[0] else ()
    return Match(
        call=batch_norm_relu_kernel,
        arguments=(*tensors, *settings),
        results=(node,),
        inner=(normed,),
        writes=tuple(one for one in statistics if isinstance(one, Node)),
    )


def softmax(node: Node) -> Found:
    """softmax(x * scale + mask). Scale and mask are optional, and the mask may be a masked_fill."""
    operation = operation_of(node)
    x = operation.get("x")
    if operation.name != "softmax" or not is_tensor(x):
        return None
    if not is_last(operation.get("dim"), x):
        return "it goes along another dimension than the last"
    inner: list[Node] = []
    mask, drops, causal = None, False, False
    before = operation_of(x)
    if before.name == "masked_fill" and before.get("value") == -math.inf and is_tensor(before.get("mask")):
        inner.append(x)
        x, mask, drops = before.get("x"), before.get("mask"), True
        if is_above_the_diagonal(mask, x):
            mask, drops, causal = None, False, True
    elif is_added_mask(x):
        inner.append(x)
        x, mask = before.get("x"), before.get("y")
    factor = scale_of(x)
    scale = 1.0 if factor is None else factor
    if factor is not None:
        inner.append(x)
        x = operation_of(x).get("x")
    arguments = (x, mask, drops, scale, causal, value_of(node).dtype)
    return Match(call=calls.masked_softmax, arguments=arguments, results=(node,), inner=tuple(inner))


def is_added_mask(node: Node) -> bool:
    """Whether it adds a mask to scores: a float tensor of fewer elements that requires no gradient."""
    x, mask = operation_of(node).get("x"), operation_of(node).get("y")
    if not (is_sum(node) and is_tensor(x) and is_tensor(mask)):
        return False
    scores, added = value_of(x), value_of(mask)
    is_smaller = added.numel() < scores.numel() and scores.shape == value_of(node).shape
    return added.is_floating_point() and not added.requires_grad and is_smaller


def is_above_the_diagonal(mask: Any, scores: Any) -> bool:
    """Whether the mask is triu(ones(n, n), 1), a causal mask, and is never written."""
    mask, passed = behind(mask, lambda node: operation_of(node).name in ("to", "as_is"))
    triangle = operation_of(mask)
    ones = triangle.get("x")
    return (
        triangle.name == "triu"
        and triangle.get("diagonal") == 1
        and operation_of(ones).name == "ones"
        and value_of(mask).shape == value_of(scores).shape[-2:]
        and not is_written((*passed, mask, ones))
    )


def scale_of(node: Any) -> float | None:
    """The number by which a float tensor is multiplied, or None. Integer tensors may overflow."""
    operation = operation_of(node)
    x, factor = operation.get("x"), operation.get("y")
    if not is_tensor(x) or isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    if value_of(x).dtype != value_of(node).dtype or not value_of(x).is_floating_point():
        return None
    if operation.name == "mul":
        return float(factor)
    return 1 / factor if operation.name == "div" and factor and operation.get("rounding_mode") is None else None
