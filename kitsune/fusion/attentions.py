"""The pattern of attention without a mask. The function takes the last node of a possible match."""

import operator
from typing import Any, Final

import torch
from torch.fx import Node

from kitsune.fusion import calls
from kitsune.fusion.match import Found, Match
from kitsune.fusion.operations import aten, is_tensor, memory_of, operation_of, value_of
from kitsune.kernels import attention as kernel

#: Views by which models take queries, keys and values from a projection.
VIEWS: Final = frozenset(
    {
        operator.getitem,
        *("chunk", "split", "unbind", "narrow", "view", "reshape", "unflatten", "flatten", "transpose", "permute"),
        *(torch.chunk, torch.split, torch.unbind, torch.narrow, torch.reshape, torch.unflatten, torch.flatten),
        *(torch.transpose, torch.permute, aten.chunk.default, aten.split.Tensor, aten.unbind.int, aten.slice.Tensor),
        *(aten.select.int, aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints),
        *(aten.transpose.int, aten.permute.default),
    }
)


def attention(node: Node) -> Found:
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
    packed = packed_of(given)
    if packed is not None:
        arguments = (packed, tuple(value_of(given[0]).shape), *settings, value_of(node).dtype)
        return Match(call=calls.packed_attention, arguments=arguments, results=(node,))
    return Match(call=calls.attention, arguments=(*given, *settings, value_of(node).dtype), results=(node,))


def packed_of(given: tuple[Any, ...]) -> Node | None:
    """The node that query, key and value are views of, in this order and nothing else; None if there is no such.

    None, too, where gradients do not flow through the views as through the node.
    """
    whole = {viewed(node) for node in given}
    if len(whole) != 1 or any(node.target is torch._C._set_grad_enabled for node in given[0].graph.nodes):
        return None
    (packed,) = whole
    values, memory = [value_of(node) for node in given], value_of(packed)
    if not isinstance(memory, torch.Tensor) or packed in given:
        return None
    batch, heads, tokens, head = values[0].shape
    width = 3 * heads * head
    are_parts = all(
        value.stride() == (tokens * width, head, width, 1) and value.storage_offset() == part * heads * head
        for part, value in enumerate(values)
    )
    is_whole = memory.is_contiguous() and memory.numel() == batch * tokens * width and memory.storage_offset() == 0
    return packed if are_parts and is_whole else None


def viewed(node: Node) -> Node:
    """What it is a view of: the first of a chain of views in the same memory, with the same gradient."""
    first = node
    while node.target in VIEWS and node.all_input_nodes and is_same(value_of(first), value_of(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node


def is_same(view: torch.Tensor, value: Any) -> bool:
    """Whether one of the values is in the memory of the view, in its dtype, and needs a gradient if the view does."""
    return any(
        memory_of(one) == memory_of(view) is not None
        and (one.dtype, one.requires_grad) == (view.dtype, view.requires_grad)
        for one in values_in(value)
    )


def values_in(value: Any) -> tuple[Any, ...]:
    """The values of a node that gives several, as chunk does, or its one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


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
