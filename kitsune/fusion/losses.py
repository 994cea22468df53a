"""Patterns of cross entropy, alone or after the last linear layer of a language model."""

from typing import Any, Final

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.norms import is_widening
from kitsune.fusion.operations import behind, is_tensor, operation_of, value_of
from kitsune.kernels import cross_entropy as kernel

#: aten's number of a reduction -> its name in torch.nn.functional.
REDUCTIONS: Final = {0: "none", 1: "mean", 2: "sum"}


def cross_entropy(node: Node) -> Found:
    operation = operation_of(node)
    x, target = operation.get("x"), operation.get("target")
    if operation.name != "cross_entropy" or not is_tensor(x):
        return None
    if operation.get("weight") is not None:
        return "its classes have weights"
    if operation.get("averages") is not None or operation.get("reduces") is not None:
        return "it says by size_average or reduce what becomes of its losses"
    if not is_tensor(target) or value_of(target).dtype != torch.int64:
        return "its targets are no class numbers"
    arguments = (x, target, *settings_of(node))
    return Match(call=kernel.cross_entropy, arguments=arguments, results=(node,), dtype=value_of(x).dtype)


def linear_cross_entropy(node: Node) -> Found:
    loss = cross_entropy(node)
    if not isinstance(loss, Match):
        return None
    logits, target, ignore_index, label_smoothing, reduction = loss.arguments
    if value_of(logits).ndim != 2 or reduction == "none":
        return None
    classes = value_of(logits).shape[-1]
    head, inner = head_of(logits, classes)
    layer = layer_of(head)
    if layer is None or value_of(head).shape[-1] != classes:
        cut = operation_of(head)
        is_cut = cut.name in ("item", "slice") and layer_of(head_of(cut.get("x"), classes)[0]) is not None
        return "its logits are cut behind the layer: cut what goes into it" if is_cut else None
    x, weight, bias = layer
    return Match(
        call=calls.head_cross_entropy,
        arguments=(x, weight, target, bias, ignore_index, label_smoothing, reduction),
        results=(node,),
        inner=(*inner, head),
        dtype=value_of(head).dtype,
    )


def head_of(logits: Any, classes: int) -> tuple[Any, list[Node]]:
    """(the input of a chain of views and casts that do not round, the chain)."""

    def is_passed(node: Any) -> bool:
        is_same = operation_of(node).name in ("view", "as_is") or is_widening(node)
        return is_same and value_of(node).shape[-1] == classes

    return behind(logits, is_passed)


def settings_of(node: Node) -> tuple[int, float, str]:
    """(ignore_index, label_smoothing, reduction)."""
    operation = operation_of(node)
    reduction = operation.get("reduction", "mean")
    if isinstance(reduction, int):
        reduction = REDUCTIONS[reduction]
    return operation.get("ignore_index", -100), operation.get("label_smoothing", 0.0), reduction


def layer_of(node: Any) -> tuple[Any, Any, Any] | None:
    """(x, weight, bias) of a linear layer, also written as x @ weight.T; else None."""
    operation = operation_of(node)
    if operation.name == "linear":
        return operation.get("x"), operation.get("weight"), operation.get("bias")
    turned = operation_of(operation.get("y"))
    is_turned = (
        turned.name == "transposed"
        or (turned.name == "attribute" and turned.get("name") in ("T", "mT"))
        or (turned.name == "transpose" and {turned.get("one"), turned.get("other")} in ({0, 1}, {-1, -2}))
    )
    weight = turned.get("x")
    if operation.name != "matmul" or not is_turned or not is_tensor(weight) or value_of(weight).ndim != 2:
        return None
    return operation.get("x"), weight, None
