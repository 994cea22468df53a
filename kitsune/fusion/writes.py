"""Finds the nodes of a graph that write to their arguments, and the memory that they write to."""

import functools
import inspect
import keyword
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kitsune.fusion.operations import memory_of, value_of

NAMES: Final = (
    *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "setitem"),
)
OPERATORS: Final = frozenset(getattr(operator, name) for name in NAMES)
#: A Triton kernel that writes its arguments. By name, since importing its module loads sympy, for half a second.
TRITON_KERNEL: Final = "triton_kernel_wrapper_mutation"
METHODS: Final = frozenset(f"__{name}__" for name in (*NAMES, "idiv"))


def mutates(node: Node) -> bool:
    """Whether the node writes to its arguments. The running statistics of a batch norm do not count."""
    return bool(written_by(node))


def is_written(nodes: Iterable[Node]) -> bool:
    """Whether any node of their graphs writes to the memory of one of them or of its views."""
    nodes = list(nodes)
    return are_written(nodes, (other for graph in {node.graph for node in nodes} for other in graph.nodes))


def are_written(nodes: Iterable[Node], others: Iterable[Node]) -> bool:
    """Whether one of `others` writes to the memory of one of `nodes`."""
    memory = memories_of(nodes)
    return any(not memory.isdisjoint(memories_of(written_by(other))) for other in others)


def memories_of(nodes: Iterable[Node]) -> set[int]:
    """Storage ids of the nodes' tensors: views share one, and tensors that are not strided have none."""
    return {memory for memory in (memory_of(value_of(node)) for node in nodes) if memory is not None}


def written_by(node: Node) -> list[Node]:
    """The arguments that the node writes to; all of them if a graph or kernel inside it writes."""
    target: Any = node.target
    if node.op == "call_method":
        return nodes_in(node.args[:1]) if target in METHODS or is_name_of_writing(str(target)) else []
    if node.op != "call_function":
        return []
    if isinstance(target, HigherOrderOperator):
        writes = target.name() == TRITON_KERNEL or any(
            mutates(inner) for body in bodies_of(node) for inner in body.nodes
        )
        return node.all_input_nodes if writes else []
    overload = getattr(target, "default", None) if isinstance(target, OpOverloadPacket) else target
    if isinstance(overload, OpOverload):
        return nodes_in(written_of_schema(overload._schema, node))
    written = nodes_in(node.kwargs.get("out"))
    if target in OPERATORS or is_name_of_writing(getattr(target, "__name__", "")) or is_told_to_write(node):
        written += nodes_in(node.args[:1] or node.kwargs)
    return written


def is_name_of_writing(name: str) -> bool:
    """Torch's names of what writes in place end with "_", as do `operator.and_` and its like, which do not write."""
    return name.endswith("_") and not name.endswith("__") and not keyword.iskeyword(name[:-1])


def is_told_to_write(node: Node) -> bool:
    """Whether its argument `inplace` is True, by position or by name."""
    given = dict(zip(parameters_of(node.target), node.args, strict=False)) | node.kwargs
    return given.get("inplace") is True


@functools.lru_cache(maxsize=1024)
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters in order; empty for a C function without a signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def written_of_schema(schema: torch.FunctionSchema, node: Node) -> list[Any]:
    given = dict(zip((one.name for one in schema.arguments), node.args, strict=False)) | node.kwargs
    return [given.get(one.name) for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]


def nodes_in(arguments: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(arguments, found.append)
    return found


def bodies_of(node: Node) -> list[Graph]:
    """The nested graphs that a node runs, such as those that torch.export makes of no_grad blocks."""
    names = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    modules = [getattr(node.graph.owning_module, name, None) for name in names]
    return [module.graph for module in modules if isinstance(module, GraphModule)]
