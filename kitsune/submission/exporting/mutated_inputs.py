"""Finds the inputs that a traced graph writes: a buffer that a step changes counts as learned."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

STATISTICS: Final = ("running_mean", "running_var")  # batch norms write them, which their schemas do not declare


def written_inputs(module: GraphModule) -> set[Node]:
    """Placeholders whose memory the graph or a nested graph writes, also through views."""
    base = {node: node for node in module.graph.nodes if node.op == "placeholder"}
    found: set[Node] = set()
    for node in (node for node in module.graph.nodes if node.op == "call_function"):
        found |= {base[value] for value in written_by(module, node) if value in base}
        source = next(iter(node.args), None)
        if is_alias(node.target) and isinstance(source, Node) and source in base:
            base[node] = base[source]
    return found


def written_by(module: GraphModule, node: Node) -> Iterator[Any]:
    """The arguments that a call writes."""
    if isinstance(node.target, torch._ops.OpOverload):
        for at, argument in enumerate(node.target._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or argument.name in STATISTICS:
                yield node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        return
    # A region without gradients or under autocast: its arguments are a graph and the inputs of that graph.
    for at, value in enumerate(node.args):
        inner = getattr(module, str(value.target)) if isinstance(value, Node) and value.op == "get_attr" else None
        if isinstance(inner, GraphModule):
            places = (one for one in inner.graph.nodes if one.op == "placeholder")
            written = written_inputs(inner)
            yield from (given for place, given in zip(places, node.args[at + 1 :], strict=False) if place in written)


def is_alias(target: Any) -> bool:
    """Whether the result aliases the first argument: views and in-place operations."""
    return isinstance(target, torch._ops.OpOverload) and any(
        out.alias_info is not None for out in target._schema.returns
    )
