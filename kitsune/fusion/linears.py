"""The pattern of linear layers of one input, as for queries, keys and values. The function takes the last of them."""

from typing import Any, Final

import torch
from torch.fx import Graph, Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of, values_in

#: Gradients of weights are slices of one tensor. Kernels read so many bytes of each at once.
ALIGNED: Final = 16


def joined_linear(node: Node) -> Found:
    """Linear layers of one input and one kind become one product, whose results are slices of one tensor."""
    x = operation_of(node).get("x")
    if not is_layer(node, x):
        return None
    readers, kind = set(x.users), kind_of(node)
    layers = [other for other in node.graph.nodes if other in readers and is_layer(other, x) and kind_of(other) == kind]
    weights, biases = ([operation_of(layer).get(name) for layer in layers] for name in ("weight", "bias"))
    if len(layers) < 2 or layers[-1] is not node or len(set(weights)) < len(weights):
        return None
    if any(value_of(weight).numel() * value_of(node).element_size() % ALIGNED for weight in weights):
        return f"a weight is no multiple of {ALIGNED} bytes"
    reason = why_untrained(layers)
    if reason is not None:
        return reason
    results = tuple(reversed(layers))
    given = [*reversed(weights), *(bias for bias in reversed(biases) if bias is not None)]
    arguments = (x, value_of(node).dtype, len(layers), *given)
    return Match(call=calls.joined_linear, arguments=arguments, results=results, any_strides=True)


def is_layer(node: Node, x: Any) -> bool:
    """Whether it is a linear layer of x."""
    layer = operation_of(node)
    tensors = (node, x, layer.get("weight"))
    return layer.name == "linear" and layer.get("x") is x and all(map(is_tensor, tensors))


def kind_of(layer: Node) -> tuple[Any, ...]:
    """What layers must have in common. Beside a frozen weight, as of a model with adapters, all would get gradients."""
    parameters = [operation_of(layer).get(name) for name in ("weight", "bias")]
    needs = (None if one is None else value_of(one).requires_grad for one in parameters)
    return value_of(layer).dtype, value_of(layer).requires_grad, *needs


def why_untrained(layers: list[Node]) -> str | None:
    """The reason where a layer gets no gradient: beside others it would get zeros, and weight decay with them."""
    if not value_of(layers[0]).requires_grad or trained(layers[0].graph).issuperset(layers):
        return None
    return "a layer of them gets no gradient"


def trained(graph: Graph) -> set[Node]:
    """The nodes from which gradients are asked for: by nodes that need them too, they lead to the output."""
    (output,) = graph.find_nodes(op="output")
    waiting, found = [output], set[Node]()
    while waiting:
        fresh = {node for node in waiting.pop().all_input_nodes if needs_gradient(node)} - found
        found |= fresh
        waiting += fresh
    return found


def needs_gradient(node: Node) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in values_in(value_of(node)))
