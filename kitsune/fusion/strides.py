"""Whether results may have other strides: only views may read them, and operations that do not depend on strides."""

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kitsune.fusion.operations import CALLS, VIEWS, memory_of, operation_of, value_of, values_in
from kitsune.fusion.writes import is_written, memories_of

#: By the names of `operation_of`: each gives a tensor of its own, whose layout follows the order of the strides.
INSENSITIVE: Final = frozenset(
    {
        *("linear", "matmul", "attention", "layer_norm", "rms_norm", "softmax", "cat", "to", "gelu", "silu", "relu"),
        *(
            "dropout",
            "add",
            "mul",
            "div",
            "neg",
            "pow",
            "square",
            "rsqrt",
            "tanh",
            "erf",
            "mean",
            "cos",
            "sin",
            "masked_fill",
        ),
    }
)
#: Others that do.
OTHERS: Final = frozenset({torch.repeat_interleave, "repeat_interleave", torch.stack, torch.sub, operator.sub, "sub"})


def restrided(results: Sequence[Node], given: Sequence[Any]) -> dict[Node, Any] | str:
    """The results with these values, whose strides differ, and the views of them; or why they may not differ.

    Where a view of a result has to copy, a write into one would not reach the other. So nothing may be written.
    """
    if is_written(results):
        return "something is written into a result, which would share its memory with others"
    found, memories = dict(zip(results, map(like, results, given), strict=True)), memories_of(results)
    for node in results[0].graph.nodes:
        if node in found or found.keys().isdisjoint(node.all_input_nodes):
            continue
        if node.target in VIEWS:
            try:
                found[node] = like(node, run_with(node, found))
            except (RuntimeError, ValueError) as error:
                return f"a view needs the strides of a result: {str(error).partition(chr(10))[0]}"
        elif not is_insensitive(node) or memory_of(value_of(node)) in memories | {None}:
            return f"{node.name} may depend on the strides of a result"
    return found


def is_insensitive(node: Node) -> bool:
    operation = operation_of(node)
    if operation.name == "dropout":  # if it drops nothing it gives its input, which examples of torch 2.11 do not show
        return operation.get("training", True) is True and operation.get("p", 0.5) != 0
    is_own = getattr(node.target, "__module__", None) == CALLS
    return is_own or node.target in OTHERS or operation.name in INSENSITIVE


def run_with(node: Node, values: dict[Node, Any]) -> Any:
    """The result of a function or method where some of its inputs have these values."""

    def value(one: Node) -> Any:
        return values.get(one, value_of(one))

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if node.op == "call_method":
        first, *rest = args
        return getattr(first, str(node.target))(*rest, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def like(node: Node, value: Any) -> Any:
    """The value, computed without gradients, with those that the node's has."""
    for one, old in zip(values_in(value), values_in(value_of(node)), strict=True):
        if isinstance(one, torch.Tensor):
            one.requires_grad_(old.requires_grad)
    return value
