"""The pattern of linear layers of one input, as for queries, keys and values. The function takes the last of them."""

from typing import Any, Final

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of, values_in

#: Gradients of weights are slices of one tensor. Kernels read so many bytes of each at once.
ALIGNED: Final = 16
#: Of their second argument they read the shape or the dtype only.
SHAPED: Final = frozenset({"type_as", "expand_as", "view_as", "reshape_as", torch.ops.aten.type_as.default})


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
    """The reason where a layer may get no gradient: beside others it would get zeros, and weight decay with them."""
    if not value_of(layers[0]).requires_grad:
        return None
    (output,) = layers[0].graph.find_nodes(op="output")
    if any(gradients_from(result).issuperset(layers) for result in output.all_input_nodes):
        return None
    return "no result gives gradients to all of its layers"


def gradients_from(result: Node) -> set[Node]:
    """The nodes that get gradients from a result of the graph: those by which it was computed, if they need them."""
    waiting = [result] if needs_gradient(result) else []
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        sources = node.all_input_nodes[:1] if node.target in SHAPED else node.all_input_nodes
        fresh = {source for source in sources if needs_gradient(source)} - found
        found |= fresh
        waiting += fresh
    return found


def needs_gradient(node: Node) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in values_in(value_of(node)))
