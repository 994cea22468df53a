"""Linear layers in a graph: those of torch, and Conv1D of Hugging Face, whose weight lies transposed."""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kitsune.fusion.operations import is_tensor, operation_of, value_of


@dataclass(frozen=True, slots=True)
class Layer:
    """`x` (..., n) times the transpose of `weight` (out, n), or times `weight` (n, out) if it lies transposed.

    `inner`: the nodes between `x` and the result.
    """

    x: Any
    weight: Any
    bias: Any
    is_transposed: bool = False
    inner: tuple[Node, ...] = ()


def layer_at(node: Any) -> Layer | None:
    """The layer whose result is a node, or None."""
    operation = operation_of(node)
    if operation.name == "linear":
        return Layer(operation.get("x"), operation.get("weight"), operation.get("bias"))
    return conv1d_at(node) if operation.name == "view" else None


def conv1d_at(node: Node) -> Layer | None:
    """Conv1D: its rows are flattened, multiplied by `addmm`, and get the shape of x again."""
    product = operation_of(node).get("x")
    operation = operation_of(product)
    flat = operation.get("x")
    x = operation_of(flat).get("x") if operation_of(flat).name == "view" else None
    bias, weight = operation.get("bias"), operation.get("weight")
    if operation.name != "addmm" or not all(map(is_tensor, (product, flat, x, bias, weight))):
        return None
    is_whole = (operation.get("beta", 1), operation.get("alpha", 1)) == (1, 1) and value_of(bias).ndim == 1
    width, out = value_of(weight).shape
    shapes = value_of(flat).shape[1:], value_of(x).shape[-1:], value_of(node).shape
    if not is_whole or shapes != ((width,), (width,), (*value_of(x).shape[:-1], out)):
        return None
    return Layer(x, weight, bias, is_transposed=True, inner=(product, flat))


def results_from(node: Node) -> list[Any]:
    """The results of the layers that read a node, with None for another user."""
    return [product_from(user, node) for user in node.users]


def product_from(user: Node, node: Node) -> Any:
    operation = operation_of(user)
    if operation.name == "linear" and operation.get("x") is node:
        return value_of(user)
    products = [other for other in user.users if operation_of(other).get("x") is user]
    if operation.name == "view" and len(products) == len(user.users) == 1 and operation_of(products[0]).name == "addmm":
        return value_of(products[0])
    return None
