"""Patterns of LayerNorm and RMSNorm, alone or after the addition of a residual."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import behind, is_last, is_tensor, operation_of, value_of
from kitsune.kernels.dtypes import DTYPES

#: Call of a norm -> call of the addition and that norm.
OF_A_SUM: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    calls.layer_norm: calls.add_layer_norm,
    calls.rms_norm: calls.add_rms_norm,
}


def layer_norm(node: Node) -> Found:
    operation = operation_of(node)
    if operation.name != "layer_norm":
        return None
    x = operation.get("x")
    if not is_over_rows(x, operation.get("shape")):
        return "it goes over more than the last dimension"
    weights = operation.get("weight"), operation.get("bias")
    arguments = (x, *weights, operation.get("eps", 1e-5), value_of(node).dtype)
    return Match(call=calls.layer_norm, arguments=arguments, results=(node,))


def rms_norm(node: Node) -> Found:
    operation = operation_of(node)
    if operation.name != "rms_norm":
        return written_rms_norm(node)
    x, weight, eps = operation.get("x"), operation.get("weight"), operation.get("eps")
    if not is_over_rows(x, operation.get("shape")):
        return "it goes over more than the last dimension"
    if weight is None:
        return "it has no weight"
    if eps is None and value_of(x).dtype != torch.float32:
        return "it leaves eps to torch, and the dtype is not fp32"  # of which dtype depends on the release
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return Match(call=calls.rms_norm, arguments=(x, weight, eps, value_of(node).dtype), results=(node,))


def written_rms_norm(node: Node) -> Found:
    """weight * (x * rsqrt(mean(x * x) + eps)), with casts to fp32 and back, as in Llama."""
    for weight, normed in factors(node):
        scaled, rounded = behind(normed, is_cast)
        for wide, root in factors(scaled):
            if operation_of(root).name != "rsqrt":
                continue
            added = operation_of(root).get("x")
            mean, eps = operation_of(added).get("x"), operation_of(added).get("y")
            square = operation_of(mean).get("x")
            if not (is_sum(added) and isinstance(eps, float)):
                continue
            if not (is_mean_of_rows(mean) and is_square_of(square, wide)):
                continue
            if value_of(weight).shape != value_of(wide).shape[-1:]:
                return "it has no weight for each element of a row"
            x, widened = behind(wide, is_widening)
            dtypes = {value_of(one).dtype for one in rounded}
            if not dtypes <= {torch.float32, value_of(x).dtype, value_of(node).dtype}:
                return "it is rounded to another dtype in between"
            inner = [*rounded, scaled, root, added, mean, square, *widened]
            arguments = (x, weight, eps, value_of(node).dtype)
            return Match(call=calls.rms_norm, arguments=arguments, results=(node,), inner=tuple(inner))
    return None


def add_layer_norm(node: Node) -> Found:
    return of_a_sum(layer_norm(node))


def add_rms_norm(node: Node) -> Found:
    return of_a_sum(rms_norm(node))


def of_a_sum(norm: Found) -> Found:
    """A norm and the addition before it. Other nodes may use the sum."""
    if not isinstance(norm, Match):
        return None
    total, *others = norm.arguments
    if not is_sum(total):
        return None
    operation = operation_of(total)
    pair = operation.get("x"), operation.get("y")
    if not all(map(is_tensor, pair)) or len({value_of(one).shape for one in pair}) != 1:
        return None
    x, residual = sorted(pair, key=lambda one: value_of(one).dtype != value_of(total).dtype)
    arguments = (x, residual, *others[:-1], value_of(total).dtype)
    return replace(norm, call=OF_A_SUM[norm.call], arguments=arguments, results=(*norm.results, total), kept=(total,))


def is_over_rows(x: Any, shape: Any) -> bool:
    return is_tensor(x) and tuple(shape) == tuple(value_of(x).shape[-1:])


def factors(node: Any) -> list[tuple[Any, Any]]:
    """Both factors of a product of two tensors, in either order."""
    operation = operation_of(node)
    pair = operation.get("x"), operation.get("y")
    if operation.name != "mul" or not all(map(is_tensor, pair)):
        return []
    return [pair, pair[::-1]]


def is_cast(node: Any) -> bool:
    return operation_of(node).name == "to"


def is_widening(node: Any) -> bool:
    """Whether it casts a dtype that kernels read to fp32 or to itself."""
    operation = operation_of(node)
    if operation.name != "to" or not is_tensor(operation.get("x")):
        return False
    before = value_of(operation.get("x")).dtype
    return before in DTYPES and value_of(node).dtype in (torch.float32, before)


def is_sum(node: Any) -> bool:
    """Whether it adds two terms with `alpha` 1."""
    operation = operation_of(node)
    return operation.name == "add" and operation.get("alpha", 1) == 1


def is_mean_of_rows(node: Any) -> bool:
    operation = operation_of(node)
    dim = operation.get("dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return operation.name == "mean" and is_last(dim, operation.get("x")) and operation.get("keepdim") is True


def is_square_of(node: Any, x: Any) -> bool:
    operation = operation_of(node)
    of_x = operation.get("x") is x
    if operation.name == "pow":
        return of_x and operation.get("y") == 2
    return of_x and (operation.name == "square" or (operation.name == "mul" and operation.get("y") is x))
