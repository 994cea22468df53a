"""Which nodes of a graph write into memory that they are given, and whose memory that is."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kitsune.fusion.operations import value_of

NAMES: Final = (
    *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "setitem"),
)
OPERATORS: Final = frozenset(getattr(operator, name) for name in NAMES)
#: A kernel of Triton that writes into its arguments. By name: its module loads sympy, for half a second.
TRITON_KERNEL: Final = "triton_kernel_wrapper_mutation"
METHODS: Final = frozenset(f"__{name}__" for name in NAMES)


def mutates(node: Node) -> bool:
    """Whether the node writes into what it is given. The statistics of a batch norm do not count."""
    return bool(written_by(node))


def is_written(nodes: Iterable[Node]) -> bool:
    """Whether anything in their graphs writes, at any time, into the memory of one of them, or of a view of it."""
    nodes = list(nodes)
    return are_written(nodes, (other for graph in {node.graph for node in nodes} for other in graph.nodes))


def are_written(nodes: Iterable[Node], others: Iterable[Node]) -> bool:
    """Whether one of the others writes into the memory of one of the nodes."""
    memory = memories_of(nodes)
    return any(not memory.isdisjoint(memories_of(written_by(other))) for other in others)


def memories_of(nodes: Iterable[Node]) -> set[int]:
    """One number for a tensor and its views; none for what lies in no memory of its own."""
    values = [value_of(node) for node in nodes]
    strided = [value for value in values if isinstance(value, torch.Tensor) and value.layout == torch.strided]
    return {int(value.untyped_storage()._cdata) for value in strided}


def written_by(node: Node) -> list[Node]:
    """What the node writes into; all that it is given where a graph or a kernel within it writes."""
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
    return name.endswith("_") and not name.endswith("__")


def is_told_to_write(node: Node) -> bool:
    """By `inplace`, wherever it stands among the arguments."""
    given = dict(zip(parameters_of(node.target), node.args, strict=False)) | node.kwargs
    return given.get("inplace") is True


@functools.lru_cache(maxsize=1024)
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Their names in their order; none of a function in C that does not tell them."""
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
    """The graphs of their own that a node runs, as torch.export makes one of a block without gradients."""
    names = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    modules = [getattr(node.graph.owning_module, name, None) for name in names]
    return [module.graph for module in modules if isinstance(module, GraphModule)]
