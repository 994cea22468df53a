"""Masks of attention that a graph builds from constants alone: a causal one, or one that hides nothing, becomes a flag.

Only without a mask does torch have FlashAttention, and Kitsune a kernel. transformers leaves a mask out of a call that
runs eagerly, but under torch.compile builds one in every step, from positions that are always the same.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from kitsune.fusion.constants import ancestors_of, constant_at, is_pure
from kitsune.fusion.operations import operation_of, value_of


def drop_constant_masks(graph: GraphModule) -> int:
    """Removes the masks that say no more than `is_causal`, or nothing, and returns of how many attentions.

    The numbers are those of the same attention, up to the rounding of another kernel.
    """
    attentions = [node for node in graph.graph.nodes if mask_of(node) is not None and is_square(node)]
    flags = {mask: flag_of(mask) for mask in dict.fromkeys(map(mask_of, attentions))}
    dropped = {node: mask_of(node) for node in attentions if flags[mask_of(node)] is not None}
    for node, mask in dropped.items():
        put_flag(node, is_causal=flags[mask] == "causal")
    if dropped:
        drop_unread(graph, set().union(*map(ancestors_of, dropped.values())))
        graph.recompile()
    return len(dropped)


def mask_of(node: Node) -> Any:
    """The mask of an attention, a node; None for any other node, and without a mask."""
    operation = operation_of(node)
    mask = operation.get("attn_mask") if operation.name == "attention" else None
    is_given = isinstance(mask, Node) and isinstance(value_of(mask), torch.Tensor)
    return mask if is_given and not operation.get("is_causal", False) else None


def is_square(node: Node) -> bool:
    """Whether it has as many keys as queries and as many as its mask each way, which repeats over batch and heads."""
    query, key = (value_of(operation_of(node).get(name)) for name in ("query", "key"))
    mask, tokens = value_of(mask_of(node)), query.shape[-2]
    outer, given = mask.shape[:-2][::-1], query.shape[:-2][::-1]
    repeats = len(outer) <= len(given) and all(size in (1, whole) for size, whole in zip(outer, given, strict=False))
    return repeats and key.shape[-2] == tokens and mask.shape[-2:] == (tokens, tokens)


def put_flag(node: Node, is_causal: bool) -> None:
    """Gives an attention the flag in place of its mask."""
    operation = operation_of(node)
    given = {name: operation.get(name) for name in ("dropout_p", "scale", "enable_gqa") if name in operation.arguments}
    node.args = tuple(operation.get(name) for name in ("query", "key", "value"))
    node.kwargs = {**given, "is_causal": is_causal}


def flag_of(mask: Node) -> str | None:
    """What a mask (..., tokens, tokens) says: "causal", "all", or None for anything else.

    A number as low as its dtype allows hides a key as minus infinity does: each query is shown at least one key, beside
    which the hidden ones have no weight.
    """
    found = constant_at(mask)
    if found is None:
        return None
    shown = found if found.dtype == torch.bool else found == 0
    if found.dtype != torch.bool and not torch.all(shown | (found <= torch.finfo(found.dtype).min)):
        return None
    if torch.all(shown):
        return "all"
    is_before = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
    return "causal" if torch.all(shown == is_before) else None


def drop_unread(graph: GraphModule, constants: set[Node]) -> None:
    """Removes those constants that nothing reads any more, so that they are not computed in every step."""
    for node in reversed(graph.graph.nodes):
        if node in constants and not node.users and is_pure(node):
            graph.graph.erase_node(node)
