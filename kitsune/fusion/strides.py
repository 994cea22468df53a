"""Whether results may have other strides: what reads them is run again on examples, as far as strides differ."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kitsune.fusion.operations import CALLS, VIEWS, memory_of, operation_of, value_of, values_in
from kitsune.fusion.writes import is_written, mutates

#: By the names of `operation_of`: each computes a tensor of its own, from elements and not from memory.
COMPUTED: Final = frozenset(
    {
        *("linear", "matmul", "attention", "layer_norm", "rms_norm", "softmax", "cat", "to", "gelu", "silu", "relu"),
        *("add", "mul", "div", "neg", "pow", "square", "rsqrt", "tanh", "erf", "mean", "cos", "sin", "masked_fill"),
        "dropout",
    }
)
#: Others that do.
OTHERS: Final = frozenset(
    {
        *(torch.repeat_interleave, "repeat_interleave", torch.stack, torch.sub, operator.sub, "sub"),
        *(torch.bmm, torch.baddbmm, torch.einsum),
    }
)


def restrided(results: Sequence[Node], given: Sequence[Any]) -> dict[Node, Any] | str:
    """What changes if the results have these values, whose strides differ; or why they may not.

    Views of a result, and what is computed from them in another layout, change too. Where a view of a result has to
    copy, a write into one would not reach the other; so nothing may be written. A copy must not become a view.
    """
    found: dict[Node, Any] = dict(zip(results, map(like, results, given), strict=True))
    for node in results[0].graph.nodes:
        if node in found or found.keys().isdisjoint(node.all_input_nodes):
            continue
        if node.op == "output":
            return "a result leaves the graph, and its strides with it"
        is_view = node.target in VIEWS or drops_nothing(node)
        if mutates(node) or not (is_view or is_computed(node)):
            return f"{node.name} may depend on the strides of a result"
        try:
            value = run_with(node, found)
        except (RuntimeError, TypeError, ValueError) as error:
            return f"a view needs the strides of a result: {str(error).partition(chr(10))[0]}"
        old, new = values_in(value_of(node)), values_in(value)
        if not are_alike(old, new):
            return f"{node.name} gives something else for a result with other strides"
        is_copied = not drops_nothing(node) and not shares(old, map(value_of, found))
        if is_copied and shares(new, found.values()):
            return f"{node.name} would share memory with a result"
        if is_view or list(map(used_strides, old)) != list(map(used_strides, new)):
            found[node] = like(node, value)
    return "something is written into a result, or a view of it" if is_written(found) else found


def is_computed(node: Node) -> bool:
    is_own = getattr(node.target, "__module__", None) == CALLS
    return is_own or node.target in OTHERS or operation_of(node).name in COMPUTED


def drops_nothing(node: Node) -> bool:
    """Whether it is a dropout that gives its input. Examples of torch 2.11 do not show that they share memory."""
    operation = operation_of(node)
    drops = operation.get("training", True) is True and operation.get("p", 0.5) != 0
    return operation.name == "dropout" and not drops


def run_with(node: Node, values: Mapping[Node, Any]) -> Any:
    """The result of a function or method where some of its inputs have these values."""

    def value(one: Node) -> Any:
        return values.get(one, value_of(one))

    if drops_nothing(node):
        return value(operation_of(node).get("x"))
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if node.op == "call_method":
        first, *rest = args
        return getattr(first, str(node.target))(*rest, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def are_alike(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether they are tensors of the same shapes and dtypes."""
    return len(old) == len(new) and all(
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        for one, other in zip(old, new, strict=True)
    )


def shares(values: Sequence[Any], others: Any) -> bool:
    """Whether any of the tensors shares memory with any of those in `others`, which may be tuples of them."""
    memories = {memory_of(each) for one in others for each in values_in(one)}
    return any(memory_of(value) in memories for value in values)


def used_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of the dimensions of size above 1."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def like(node: Node, value: Any) -> Any:
    """The value, computed without gradients, with those that the node's has. Of its own, so that no other changes."""
    old = values_in(value_of(node))
    new = [one.detach().requires_grad_(given.requires_grad) for one, given in zip(values_in(value), old, strict=True)]
    return type(value)(new) if isinstance(value, (tuple, list)) else new[0]
