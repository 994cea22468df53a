"""Finds nodes of a graph that depend on constants alone, and computes them while the graph is compiled."""

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from kitsune.fusion.operations import aten, memory_of, value_of, values_in
from kitsune.fusion.writes import memories_of, mutates

#: Methods that always give the same for the same arguments, and write nothing.
METHODS: Final = frozenset(
    {
        *("add", "sub", "mul", "eq", "ne", "le", "lt", "ge", "gt", "cumsum", "diff", "tril", "triu", "masked_fill"),
        *("__and__", "__or__", "__invert__", "__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__"),
        *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("__getitem__", "view", "reshape", "expand", "expand_as", "repeat", "unsqueeze", "squeeze", "transpose"),
        *("permute", "contiguous", "to", "bool", "int", "long", "float", "type", "clone"),
        *("new_ones", "new_zeros", "new_full"),
    }
)
#: The same of operators of aten, by their names there.
OPERATORS: Final = METHODS | {
    *("arange", "ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "scalar_tensor", "where", "index"),
    *("floor_divide", "slice", "select", "_to_copy", "_unsafe_view", "alias", "detach", "lift_fresh_copy"),
}
#: The same of functions.
FUNCTIONS: Final = frozenset(
    {
        *(torch.arange, torch.ones, torch.zeros, torch.full, torch.ones_like, torch.zeros_like, torch.full_like),
        *(torch.tril, torch.triu, torch.diff, torch.where, torch.cumsum, torch.logical_and, torch.logical_or),
        *(torch.logical_not, torch.bitwise_and, torch.bitwise_or, torch.bitwise_not, aten.index),
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.getitem),
        *(operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
        *(operator.and_, operator.or_, operator.invert),
    }
)
#: Levels of vmap, by which transformers 4 builds its masks. Nothing reads these nodes, but others run within them.
LEVELS: Final = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
BATCHES: Final = frozenset({"_add_batch_dim", "_remove_batch_dim"})
#: Where functions of torch are found by their names.
TORCH: Final = (torch, F, torch._C._nn, operator)


def constant_at(node: Node) -> torch.Tensor | None:
    """The value of a node; None where it depends on anything but constants, or where that cannot be told."""
    needed = ancestors_of(node)
    is_known = all(map(is_constant, needed)) and are_only_read(needed) and is_at_level_zero(node, needed)
    return computed(node, needed) if is_known else None


def ancestors_of(node: Node) -> set[Node]:
    """The node and all that it depends on."""
    found, left = set[Node](), [node]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += one.all_input_nodes
    return found


def is_constant(node: Node) -> bool:
    """Whether its result, or what it writes, depends on its arguments alone, and these have no symbolic sizes."""
    is_known = is_pure(node) or node.target is operator.iadd  # transformers 4 adds an offset to its positions in place
    return is_known and not any(isinstance(one, torch.SymInt) for one in pytree.tree_leaves((node.args, node.kwargs)))


def is_pure(node: Node) -> bool:
    """Whether it writes nothing, and always gives the same for the same arguments, also under autocast."""
    if node.kwargs.get("out") is not None or (is_sum(node) and value_of(node).dtype.is_floating_point):
        return False
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.partition("aten::")[2] in OPERATORS and not target._schema.is_mutable
    if node.op == "call_method":
        return target in METHODS
    return node.op == "call_function" and (target in FUNCTIONS or name_in_functorch(node) in BATCHES)


def is_sum(node: Node) -> bool:
    """Autocast has other dtypes for it."""
    return "cumsum" in str(node.target) and isinstance(value_of(node), torch.Tensor)


def are_only_read(needed: set[Node]) -> bool:
    """Whether no other node can write to one of these, or to a view of it: each node that gets one is known to read."""
    memory = memories_of(needed)
    seen, left = set(needed), list(needed)
    while left:
        for user in left.pop().users:
            if user in seen:
                continue
            if not only_reads(user):
                return False
            if may_share(user, memory):
                seen.add(user)
                left.append(user)
    return True


def only_reads(node: Node) -> bool:
    target: Any = node.target
    if node.op == "output":
        return True
    if mutates(node):
        return False
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(target)) and target != "numpy"
    is_declared = isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator))
    name = getattr(target, "__name__", "")
    is_torchs = target is getattr or any(getattr(home, name, None) is target for home in TORCH)
    return is_declared or is_torchs or bool(name_in_functorch(node))


def may_share(node: Node, memory: set[int]) -> bool:
    """Whether its result may be a view of such memory. Tensors of torch.func do not tell theirs."""
    tensors = [one for one in values_in(value_of(node)) if isinstance(one, torch.Tensor)]
    return value_of(node) is None or any(memory_of(one) is None or memory_of(one) in memory for one in tensors)


def is_at_level_zero(node: Node, needed: set[Node]) -> bool:
    """Whether all levels of torch.func before it are vmap's, of a known size, and end before it."""
    levels = [one for one in nodes_to(node) if name_in_functorch(one).endswith("crement_nesting")]
    are_known = all(level_of(one) != 0 and needed.issuperset(one.all_input_nodes) for one in levels)
    return are_known and sum(map(level_of, levels)) == 0


def computed(last: Node, needed: set[Node]) -> torch.Tensor:
    """The value of the last one of `needed`."""
    values: dict[Node, Any] = {}
    entered = 0
    try:
        with torch.no_grad():
            for node in nodes_to(last):
                if node in needed or level_of(node):
                    values[node] = called(node, values)
                    entered += level_of(node)
    finally:
        for _ in range(entered):
            torch._C._functorch._vmap_decrement_nesting()
    found: torch.Tensor = values[last]
    return found


def called(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    return target(*args[node.op == "call_method" :], **kwargs)


def level_of(node: Node) -> int:
    """1 where a level of vmap begins, -1 where one ends."""
    return LEVELS.get(name_in_functorch(node), 0)


def name_in_functorch(node: Node) -> str:
    """The name of its function, if that is a part of torch.func: its module is another one in each version of torch."""
    is_part = "functorch" in (getattr(node.target, "__module__", None) or "")
    return str(getattr(node.target, "__name__", "")) if is_part else ""


def nodes_to(last: Node) -> Iterator[Node]:
    """The nodes of its graph in order, up to this one."""
    for node in last.graph.nodes:
        yield node
        if node is last:
            return
