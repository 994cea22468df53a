"""The pattern of linear layers of one input, as for queries, keys and values. The function takes the last of them."""

from typing import Any

from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of


def joined_linear(node: Node) -> Found:
    """Linear layers of one input become one product, whose results are slices of one tensor."""
    x = operation_of(node).get("x")
    if not is_layer(node, x):
        return None
    readers = set(x.users)
    layers = [other for other in node.graph.nodes if other in readers and is_layer(other, x)]
    weights, biases = ([operation_of(layer).get(name) for layer in layers] for name in ("weight", "bias"))
    if len(layers) < 2 or layers[-1] is not node or len(set(weights)) < len(weights):
        return None
    kinds = {(value_of(layer).dtype, value_of(layer).requires_grad) for layer in layers}
    if len(kinds) > 1:
        return "its layers give different dtypes, or only some need gradients"
    if None in biases and any(bias is not None for bias in biases):
        return "only some of its layers have biases"
    results = tuple(reversed(layers))
    given = [*reversed(weights), *(bias for bias in reversed(biases) if bias is not None)]
    arguments = (x, value_of(node).dtype, len(layers), *given)
    return Match(call=calls.joined_linear, arguments=arguments, results=results, any_strides=True)


def is_layer(node: Node, x: Any) -> bool:
    """Whether it is a linear layer of x, with results of as many dimensions."""
    layer = operation_of(node)
    tensors = (node, x, layer.get("weight"))
    return layer.name == "linear" and layer.get("x") is x and all(map(is_tensor, tensors))
