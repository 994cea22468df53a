"""Masks of attention that a graph builds from constants alone: a causal one, or one that hides nothing, becomes a flag.

Only without a mask does torch have FlashAttention, and Kitsune a kernel. transformers leaves a mask out of a call that
runs eagerly, but under torch.compile builds one in every step, from positions that are always the same.
"""

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from kitsune.fusion.operations import aten, operation_of, value_of
from kitsune.fusion.writes import are_written, mutates

#: Levels of vmap, by which transformers 4 builds its masks. Nothing reads these nodes, but others run within them.
LEVELS: Final = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
BATCHES: Final = frozenset({"_add_batch_dim", "_remove_batch_dim"})
#: Functions and methods that always give the same for the same arguments, and write nothing.
PURE: Final = frozenset(
    {
        *(torch.arange, torch.ones, torch.zeros, torch.full, torch.ones_like, torch.zeros_like, torch.full_like),
        *(torch.tril, torch.triu, torch.diff, torch.where, torch.cumsum, torch.logical_and, torch.logical_or),
        *(torch.logical_not, torch.bitwise_and, torch.bitwise_or, torch.bitwise_not, aten.index),
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.getitem),
        *(operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
        *(operator.and_, operator.or_, operator.invert),
        *("add", "sub", "mul", "eq", "ne", "le", "lt", "ge", "gt"),
        *("__and__", "__or__", "__invert__", "__eq__", "__ne__", "__le__", "__lt__", "__ge__", "__gt__"),
        *("__getitem__", "new_ones", "new_zeros", "new_full", "tril", "triu", "cumsum", "diff", "masked_fill"),
        *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("view", "reshape", "expand", "expand_as", "repeat", "unsqueeze", "squeeze", "transpose", "permute"),
        *("contiguous", "to", "bool", "int", "long", "float", "type", "clone"),
    }
)


def drop_constant_masks(graph: GraphModule) -> int:
    """Removes the masks that say no more than `is_causal`, or nothing, and returns of how many attentions.

    The numbers are those of the same attention, up to the rounding of another kernel.
    """
    attentions = [node for node in graph.graph.nodes if mask_of(node) is not None]
    flags = {mask: flag_of(mask) for mask in dict.fromkeys(map(mask_of, attentions)) if mask is not None}
    dropped = [node for node in attentions if flags[mask_of(node)] is not None and is_square(node)]
    for node in dropped:
        put_flag(node, is_causal=flags[mask_of(node)] == "causal")
    if dropped:
        drop_unread(graph)
        graph.recompile()
    return len(dropped)


def mask_of(node: Node) -> Any:
    """The mask of an attention, a node; None for any other node, and without a mask."""
    operation = operation_of(node)
    mask = operation.get("attn_mask") if operation.name == "attention" else None
    is_given = isinstance(mask, Node) and isinstance(value_of(mask), torch.Tensor)
    return mask if is_given and not operation.get("is_causal", False) else None


def is_square(node: Node) -> bool:
    """Whether it has as many keys as queries, in at least two dimensions, and as many as its mask."""
    query, key = (value_of(operation_of(node).get(name)) for name in ("query", "key"))
    return bool(query.shape[-2] == key.shape[-2] == value_of(mask_of(node)).shape[-1])


def put_flag(node: Node, is_causal: bool) -> None:
    """Gives an attention the flag in place of its mask."""
    operation = operation_of(node)
    given = {name: operation.get(name) for name in ("dropout_p", "scale", "enable_gqa") if name in operation.arguments}
    node.args = tuple(operation.get(name) for name in ("query", "key", "value"))
    node.kwargs = {**given, "is_causal": is_causal}


def flag_of(mask: Node) -> str | None:
    """What a mask says that depends on constants alone: "causal", "all", or None for anything else."""
    needed = ancestors_of(mask)
    others = [node for node in mask.graph.nodes if node not in needed]
    if not all(map(is_constant, needed)) or are_written(needed, others) or levels_before(mask):
        return None
    if any(mutates(user) for node in needed for user in node.users if user not in needed):
        return None
    shape = value_of(mask).shape
    return said_by(computed(mask, needed)) if len(shape) > 1 and shape[-1] == shape[-2] else None


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
    target = node.target
    if isinstance(target, OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    is_call = node.op in ("call_function", "call_method")
    return is_call and (target in PURE or name_in_vmap(node) in BATCHES)


def computed(mask: Node, needed: set[Node]) -> torch.Tensor:
    """The mask itself."""
    values: dict[Node, Any] = {}
    entered = 0
    try:
        with torch.no_grad():
            for node in nodes_to(mask):
                if node in needed or level_of(node):
                    values[node] = called(node, values)
                    entered += level_of(node)
    finally:
        for _ in range(entered):
            torch._C._functorch._vmap_decrement_nesting()
    found: torch.Tensor = values[mask]
    return found


def levels_before(mask: Node) -> int:
    """In how many levels of vmap the mask is computed."""
    return sum(map(level_of, nodes_to(mask)))


def level_of(node: Node) -> int:
    """1 where a level of vmap begins, -1 where one ends."""
    return LEVELS.get(name_in_vmap(node), 0)


def name_in_vmap(node: Node) -> str:
    """The name of its function, if that is a part of vmap: its module is another one in each version of torch."""
    is_part = "functorch" in (getattr(node.target, "__module__", None) or "")
    return str(getattr(node.target, "__name__", "")) if is_part else ""


def nodes_to(last: Node) -> Iterator[Node]:
    """The nodes of its graph in order, up to this one."""
    for node in last.graph.nodes:
        yield node
        if node is last:
            return


def called(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    return target(*args[node.op == "call_method" :], **kwargs)


def said_by(mask: torch.Tensor) -> str | None:
    """Of a mask (..., tokens, tokens). A number as low as its dtype allows hides a key as minus infinity does: each
    query is shown at least one key, beside which the hidden ones have no weight."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not torch.all(shown | (mask <= torch.finfo(mask.dtype).min)):
        return None
    if torch.all(shown):
        return "all"
    is_before = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "causal" if torch.all(shown == is_before) else None


def drop_unread(graph: GraphModule) -> None:
    """Removes what masks were built by and nothing reads any more, so that it does not run in every step."""
    for node in reversed(graph.graph.nodes):
        if not node.users and is_pure(node):
            graph.graph.erase_node(node)
