"""The pattern of attention over short sequences. The function takes the last node of a possible match."""

from typing import Any

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import is_tensor, operation_of, value_of
from kitsune.kernels import attention as kernel


def short_attention(node: Node) -> Found:
    """scaled_dot_product_attention without a mask, over as many keys as queries."""
    operation = operation_of(node)
    given = tuple(operation.get(name) for name in ("query", "key", "value"))
    if operation.name != "attention" or not all(map(is_tensor, given)):
        return None
    if operation.get("attn_mask") is not None:
        return "it has a mask"
    if operation.get("enable_gqa", False):
        return "its heads share keys and values"
    reason = why_unfit(*map(value_of, given)) or why_chosen(node)
    if reason is not None:
        return reason
    settings = operation.get("scale"), operation.get("is_causal", False), operation.get("dropout_p", 0.0)
    return Match(call=calls.short_attention, arguments=(*given, *settings, value_of(node).dtype), results=(node,))


def why_unfit(query: Any, key: Any, value: Any) -> str | None:
    """Why the kernel does not support tensors of these shapes, or None."""
    if query.ndim != 4:
        return "its tensors are not of batch, heads, positions and head"
    if not query.shape == key.shape == value.shape:
        return "its queries, keys and values are of different shapes"
    tokens, head = query.shape[2:]
    if not kernel.fits(tokens, head):
        return f"no kernel supports {tokens} positions and heads of {head} elements"
    return None


def why_chosen(node: Node) -> str | None:
    """The reason where the model itself chooses among torch's implementations, or None."""
    for other in node.graph.nodes:
        if other is node:
            break
        if other.target is torch.nn.attention._sdpa_kernel:
            return "the model chooses its implementation by sdpa_kernel"
    return None
